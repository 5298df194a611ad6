"""Worker groups for tests of the doctor: a service's real RPCs, in this process, without a model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch

from controller.commands.doctor.examination import examine_run
from controller.commands.doctor.facts import Facts, Finding
from controller.commands.doctor.findings import find
from services.runtime.context import RankContext
from services.runtime.failures.device import DeviceState
from services.runtime.failures.heartbeat import VitalSign
from services.runtime.rpc.auth_interceptor import TokenInterceptor
from services.runtime.rpc.diagnosis import DiagnosisServicer
from services.runtime.rpc.limits import CallLimit
from services.runtime.rpc.method_adapter import methods_of, service_handler
from services.runtime.rpc.servicer import WorkerServicer
from services.runtime.state.batch_store import BatchStore
from services.runtime.state.ledger import Ledger
from services.runtime.state.worker import Worker
from splitppo.config.load import validate
from splitppo.config.section import RoleName
from splitppo.rpc.bearer_tokens import BearerTokens
from splitppo.rpc.certificates import Identity
from splitppo.rpc.channel_options import SERVER_OPTIONS
from splitppo.rpc.credentials import PLAINTEXT, Credentials
from splitppo.v1 import worker_pb2
from tests.support.certificates import TOKEN
from tests.support.groups import free_address

ROLES = {"actor": worker_pb2.ROLE_ACTOR, "critic": worker_pb2.ROLE_CRITIC, "rollout": worker_pb2.ROLE_ROLLOUT}


def tree(run_dir: Path, *, has_critic: bool = True, **services: Any) -> dict[str, Any]:
    """A configuration with an actor and, where there is one, a critic."""
    return {
        "run": {"dir": str(run_dir), "total_steps": 1},
        "data": {"train_files": "x", "train_batch_size": 1},
        "actor": {"model": "x"},
        "algorithm": {"adv_estimator": "gae" if has_critic else "grpo"},
        "rollout": {"n": 2},
        "services": services,
    }


def external(run_dir: Path, actor: str, critic: str = "", **services: Any) -> dict[str, Any]:
    """The configuration of who asks; without a critic where that has no address."""
    addresses: dict[str, Any] = {"actor": {"address": actor}, "critic": {"address": critic}}
    return tree(run_dir, launch="external", has_critic=bool(critic), **addresses, **services)


async def ask(configuration: dict[str, Any]) -> tuple[Facts, list[Finding]]:
    facts = await examine_run(validate(configuration, "test"))
    return facts, find(facts)


def identity(folder: Path, role: str) -> Identity:
    """Returns the identity of a process without any check, as if the process had started long ago."""
    return Identity(*((folder / name).read_bytes() for name in ("ca.pem", f"{role}.pem", f"{role}.key")))


def credentials(folder: Path, role: str) -> Credentials:
    return Credentials(identity(folder, role), BearerTokens((TOKEN,)))


@dataclass
class Served:
    """A group that answers: what a test changes, and what it looks at."""

    address: str
    worker: Worker
    signs: dict[int, VitalSign] = field(default_factory=dict)


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves a group: (role, configuration tree) and the credentials that it asks callers for."""
    servers: list[grpc.aio.Server] = []

    async def start(
        role: RoleName,
        configuration: Mapping[str, Any],
        credentials: Credentials = PLAINTEXT,
        *,
        clock_offset_s: float = 0.0,
        without: str = "",
    ) -> Served:
        config = validate(dict(configuration), "test")
        config.run.dir.mkdir(parents=True, exist_ok=True)
        control: Any = None
        context = RankContext(role, 0, 2, torch.device("cpu"), control, config)
        processes = [worker_pb2.Process(rank=rank, pid=100 + rank, host="gpu-one") for rank in range(2)]
        ledger = Ledger(-1 if role == "rollout" else 0)
        worker = Worker(context, ROLES[role], 1, processes, ledger, BatchStore(config.services.max_held_bytes))
        served = Served(free_address(), worker)
        served.signs |= {rank: VitalSign(DeviceState("H200", 3 << 30, 4 << 30), 0.5) for rank in range(2)}
        service = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
        servicer = WorkerServicer(worker)

        async def get_status(request: Any, call: Any) -> worker_pb2.GetStatusResponse:
            """By a clock that may be off."""
            status = await servicer.get_status(request, call)
            status.unix_ns = time.time_ns() + int(clock_offset_s * 1e9)
            return status

        diagnosis = DiagnosisServicer(worker, credentials, lambda: served.signs)
        methods = methods_of(servicer, service) | methods_of(diagnosis, service) | {"GetStatus": get_status}
        methods.pop(without, None)
        tokens = credentials.tokens
        server = grpc.aio.server(
            interceptors=[TokenInterceptor(tokens, role, open_health=True)] if tokens else [],
            options=list(SERVER_OPTIONS),
        )
        server.add_generic_rpc_handlers((service_handler(service, methods, role, CallLimit(64)),))
        credentials.listen(server, served.address)
        await server.start()
        servers.append(server)
        return served

    yield start
    for server in servers:
        await server.stop(0)
