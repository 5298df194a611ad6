"""The index of this machine in its group, and addresses that other machines can reach."""

from __future__ import annotations

import socket

import pytest

from services.runtime.group.machine import own_address, this_machine
from splitppo.config import ConfigError, ServiceConfig

THERE = ServiceConfig(num_processes=4, nnodes=4, master_addr="127.0.0.1")


def mistake(service: ServiceConfig, node_rank: int | None, environment: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as refused:
        this_machine(service, "services.actor", node_rank, environment)
    return str(refused.value)


@pytest.mark.parametrize(
    ("node_rank", "environment", "sentence"),
    [
        (
            None,
            {},
            "which machine of the group is this? expected --node-rank 0 to 3, because services.actor.nnodes is 4",
        ),
        (4, {}, "this machine's node rank is 4, expected 0 to 3, because services.actor.nnodes is 4"),
        (None, {"SLURM_NODEID": "7"}, "this machine's node rank is 7, expected 0 to 3"),
        (None, {"JOB_COMPLETION_INDEX": "9"}, "this machine's node rank is 9, expected 0 to 3"),
    ],
)
def test_a_machine_must_know_its_number(node_rank: int | None, environment: dict[str, str], sentence: str) -> None:
    assert mistake(THERE, node_rank, environment).startswith(sentence)


@pytest.mark.parametrize("environment", [{}, {"SLURM_NODEID": "9"}])
def test_a_meeting_place_on_loopback_is_refused(environment: dict[str, str]) -> None:
    """Whatever the scheduler says, --node-rank wins."""
    sentence = (
        f"master_addr '127.0.0.1' is 127.0.0.1 on {socket.gethostname()}, which no other machine reaches: expected"
    )
    assert sentence in mistake(THERE, 1, environment)


def test_the_own_address_is_the_one_on_the_way_there() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
