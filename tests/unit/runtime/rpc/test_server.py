"""The start of the server."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from services.runtime.command import Command, Effect, Outcome
from services.runtime.rpc.server import Server
from services.runtime.rpc.servicer import service_of
from splitppo.config.subsections.security import SecurityConfig
from splitppo.v1 import actor_pb2, critic_pb2


@pytest.fixture
def worker() -> Any:
    class Nobody:
        """Nothing else is asked of the worker before the server listens."""

        commands = ()

    return Nobody()


def test_a_taken_port_is_the_users_mistake_in_one_sentence(worker: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"cannot listen on '{bind}': Address already in use"):
            Server(worker, bind, SecurityConfig()).start()


@pytest.mark.parametrize("bind", ["nowhere", "127.0.0.1:notaport", "127.0.0.1:99999", "no.such.host.invalid:0"])
def test_an_address_that_is_none_is_refused(worker: Any, bind: str) -> None:
    with pytest.raises(ValueError, match="cannot listen on"):
        Server(worker, bind, SecurityConfig()).start()


def test_commands_belong_to_the_service_that_declares_them() -> None:
    update = Command("Update", actor_pb2.ActorUpdateRequest, Effect.TRAINS, lambda *_: Outcome())
    assert service_of(update).full_name == "splitppo.v1.ActorService"


def test_a_command_that_no_service_declares_is_a_bug() -> None:
    stranger = Command("Generate", critic_pb2.ComputeValuesRequest, Effect.WRITES_SLOT, lambda *_: Outcome())
    with pytest.raises(ValueError, match="declares no RPC Generate"):
        service_of(stranger)
