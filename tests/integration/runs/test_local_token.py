"""What keeps other users of the machine out of a run whose groups the controller has started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from splitppo.rpc.errors import error_from_rpc
from splitppo.rpc.security import PLAINTEXT, Credentials
from splitppo.rpc.tokens import Tokens
from splitppo.v1 import worker_pb2, worker_pb2_grpc
from tests.runs import RunFolder, started

Completed = Callable[[str, int], RunFolder]


def status(address: str, credentials: Credentials) -> worker_pb2.GetStatusResponse:
    with credentials.blocking_channel(address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        return stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=20)


def test_workers_answer_only_to_the_token_of_their_run(config: dict[str, Any], tmp_path: Path) -> None:
    with started(config, tmp_path / "run", "run.total_steps=1", "algorithm.adv_estimator=grpo") as controller:
        controller.wait_until(lambda folder: folder.processes, "the groups")
        token_file = tmp_path / "run" / "services" / "token"
        token = token_file.read_text()
        assert token_file.stat().st_mode & 0o077 == 0
        [address] = {one["address"] for one in controller.folder.processes if one["address"]}
        assert status(address, Credentials(tokens=Tokens((token,)))).role == worker_pb2.ROLE_ACTOR
        with pytest.raises(grpc.RpcError) as refused:
            status(address, PLAINTEXT)
        assert str(error_from_rpc(refused.value)).startswith("actor, GetStatus: no token")
        folder = controller.complete()
    files = [file for file in folder.path.rglob("*") if file.is_file()]
    assert [file for file in files if token.encode() in file.read_bytes()] == []
    assert token not in controller.output
