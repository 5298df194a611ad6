"""Clients of a scripted worker."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from controller.workers.clients import ActorClient, Caller
from splitppo.rpc.channel_options import SERVER_OPTIONS
from splitppo.v1 import (
    actor_pb2_grpc,
    critic_pb2_grpc,
    reference_pb2_grpc,
    reward_model_pb2_grpc,
    teacher_pb2_grpc,
    worker_pb2_grpc,
)
from tests.support.fake_worker import CALLER, Connect, FakeWorker


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Serves a fake worker and gives a client of it."""
    opened: list[Any] = []

    async def serve(worker: FakeWorker, kind: Any = ActorClient, *, caller: Caller = CALLER, **options: Any) -> Any:
        server = grpc.aio.server(options=list(SERVER_OPTIONS))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
        actor_pb2_grpc.add_ActorServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
        critic_pb2_grpc.add_CriticServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
        reference_pb2_grpc.add_ReferenceServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
        reward_model_pb2_grpc.add_RewardModelServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
        teacher_pb2_grpc.add_TeacherServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        client = kind(f"127.0.0.1:{port}", caller, **options)
        opened.append((client, server))
        return client

    yield serve
    for client, server in opened:
        await client.close()
        await server.stop(0)
