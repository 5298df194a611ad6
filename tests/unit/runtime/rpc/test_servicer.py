"""What is answered on the gRPC thread, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from services.runtime.context import RankContext
from services.runtime.role import Command, Outcome
from services.runtime.rpc.servicer import WorkerServicer, command_method
from services.runtime.state.batch_store import BatchStore
from services.runtime.state.ledger import Ledger
from services.runtime.state.worker import Worker
from splitppo import __version__
from splitppo.batch import Batch
from splitppo.config.load import validate
from splitppo.rpc.errors import LimitExceeded, StaleEpoch, Unavailable, WrongState
from splitppo.rpc.request_id import PROTOCOL_VERSION
from splitppo.v1 import actor_pb2, batch_pb2, worker_pb2
from tests.batch_streams import encode

SLOT = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1)


def make_worker(run_dir: Path, **services: Any) -> Worker:
    tree = {
        "run": {"dir": str(run_dir), "total_steps": 1},
        "data": {"train_files": "x", "train_batch_size": 1},
        "actor": {"model": "x"},
        "services": services,
    }
    control: Any = None
    context = RankContext("actor", 0, 1, 0, torch.device("cpu"), control, validate(tree, "test"))
    worker = Worker(context, worker_pb2.ROLE_ACTOR, 1, (), Ledger(), BatchStore(context.config.services.max_held_bytes))
    worker.fencing.take("run", 1)
    return worker


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return make_worker(tmp_path)


async def test_the_status_says_what_a_stranger_has_to_introduce_itself_with(worker: Worker) -> None:
    (worker.context.config.run.dir / "nonce").touch()
    servicer = WorkerServicer(worker)
    status = await servicer.get_status(worker_pb2.GetStatusRequest(), None)
    known = {name: getattr(status, name) for name in ("protocol_version", "software_version", "config_digest")}
    assert all(known.values())

    request = worker_pb2.HandshakeRequest(run_id="run", epoch=2, nonce="nonce", **known)
    assert (await servicer.handshake(request, None)).committed_step == 0


@pytest.mark.parametrize(("trains", "left"), [(True, [SLOT]), (False, [])])
async def test_a_handshake_drops_the_rows_of_a_group_that_loads_no_checkpoint(
    worker: Worker, trains: bool, left: list[batch_pb2.Slot]
) -> None:
    (worker.context.config.run.dir / "nonce").touch()
    worker.ledger = worker.ledger if trains else None
    worker.slots.put(SLOT, Batch.from_rows(prompts=[[1]]), worker.committed_step)
    servicer = WorkerServicer(worker)
    status = await servicer.get_status(worker_pb2.GetStatusRequest(), None)
    known = {name: getattr(status, name) for name in ("protocol_version", "software_version", "config_digest")}

    request = worker_pb2.HandshakeRequest(run_id="run", epoch=1, nonce="nonce", **known)
    assert (await servicer.handshake(request, None)).committed_step == 0
    assert worker.slots.slots() == left


async def test_a_put_that_a_newer_controller_overtakes_changes_nothing(worker: Worker) -> None:
    header, chunks = encode(Batch.from_rows(prompts=[[1, 2], [3]]), SLOT)

    async def stream() -> AsyncIterator[bytes]:
        opening = worker_pb2.PutBatchHeader(run_id="run", epoch=1, batch=header)
        yield worker_pb2.PutBatchRequest(header=opening).SerializeToString()
        worker.fencing.take("run", 2)
        for chunk in chunks:
            yield worker_pb2.PutBatchRequest(chunk=chunk).SerializeToString()

    with pytest.raises(StaleEpoch):
        await WorkerServicer(worker).put_batch(stream(), None)
    assert worker.slots.slots() == []


async def test_a_batch_that_is_not_complete_in_time_is_given_up_and_its_room_comes_back(tmp_path: Path) -> None:
    worker = make_worker(tmp_path, max_send_s=0.2)
    header, _ = encode(Batch.from_rows(prompts=[[1, 2], [3]]), SLOT)

    async def stream() -> AsyncIterator[bytes]:
        opening = worker_pb2.PutBatchHeader(run_id="run", epoch=1, batch=header)
        yield worker_pb2.PutBatchRequest(header=opening).SerializeToString()
        await asyncio.Event().wait()

    with pytest.raises(LimitExceeded, match=r"services\.max_send_s"):
        await WorkerServicer(worker).put_batch(stream(), None)
    assert worker.slots.slots() == []
    with worker.slots.reserved(worker.context.config.services.max_held_bytes):
        pass


async def test_every_part_is_streamed_before_the_result_also_to_a_client_that_joins_late(worker: Worker) -> None:
    generate = Command("Generate", actor_pb2.GenerateRequest, lambda *_: Outcome())
    header = worker_pb2.CommandHeader(run_id="run", epoch=1, request_id="one")
    request = actor_pb2.GenerateRequest(header=header, slot=SLOT)
    serve = command_method(worker, generate)
    events = serve(request, None)
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    call = worker.command_queue.take(0.0)
    assert call is not None
    call.part_ready(worker_pb2.PartReady(part=2, num_parts=2))
    assert (await first).part.part == 2
    late = serve(request, None)
    assert (await anext(late)).part.part == 2
    call.part_ready(worker_pb2.PartReady(part=1, num_parts=2))
    call.resolve(worker_pb2.CommandResult(policy_version=4))
    for stream in (events, late):
        *parts, last = [event async for event in stream]
        assert [event.part.part for event in parts] == [1]
        assert last.result.policy_version == 4


async def test_a_newer_controller_refuses_what_waits_for_the_older_one(worker: Worker, tmp_path: Path) -> None:
    header = worker_pb2.CommandHeader(run_id="run", epoch=1, request_id="one")
    request = worker_pb2.ComputeWeightsDigestRequest(header=header)
    digest = Command("ComputeWeightsDigest", type(request), lambda *_: Outcome())
    waiting = asyncio.ensure_future(anext(command_method(worker, digest)(request, None)))
    await asyncio.sleep(0)
    (tmp_path / "nonce").touch()
    greeting = worker_pb2.HandshakeRequest(
        protocol_version=PROTOCOL_VERSION,
        run_id="run",
        epoch=2,
        config_digest=worker.config_digest,
        nonce="nonce",
    )
    await WorkerServicer(worker).handshake(greeting, None)
    with pytest.raises(Unavailable, match="a newer controller has taken over"):
        await waiting


async def test_a_controller_of_another_version_is_refused_and_takes_nothing_over(
    worker: Worker, tmp_path: Path
) -> None:
    (tmp_path / "nonce").touch()
    greeting = worker_pb2.HandshakeRequest(
        protocol_version=PROTOCOL_VERSION,
        software_version="0.0.9",
        run_id="run",
        epoch=2,
        config_digest=worker.config_digest,
        nonce="nonce",
    )
    with pytest.raises(
        WrongState, match=rf"the controller has version 0\.0\.9 .* this worker has version {__version__}"
    ):
        await WorkerServicer(worker).handshake(greeting, None)
    assert (worker.fencing.epoch, WrongState.code) == (1, grpc.StatusCode.FAILED_PRECONDITION)
    greeting.software_version = __version__
    await WorkerServicer(worker).handshake(greeting, None)
    assert worker.fencing.epoch == 2


def test_a_checkpoint_saved_before_a_load_is_no_answer_afterwards(worker: Worker) -> None:
    worker.ledger.remember_save("save-5", worker_pb2.CommandResult(committed_step=5))
    assert worker.ledger.reply_of_save("save-5") is not None
    worker.ledger.restore(b"", 0)
    assert worker.ledger.reply_of_save("save-5") is None


async def test_a_reply_that_is_kept_answers_its_own_method_only(worker: Worker) -> None:
    worker.ledger.remember_save("same", worker_pb2.CommandResult())
    header = worker_pb2.CommandHeader(run_id="run", epoch=1, request_id="same")
    load = Command("LoadCheckpoint", worker_pb2.LoadCheckpointRequest, lambda *_: Outcome(), repairs=True)
    events = command_method(worker, load)(worker_pb2.LoadCheckpointRequest(header=header), None)
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert (worker.command_queue.num_queued, waiting.done()) == (1, False)
    waiting.cancel()


async def test_a_reply_that_is_kept_answers_the_save_that_it_is_of(worker: Worker) -> None:
    reply = worker_pb2.CommandResult(committed_step=1)
    worker.ledger.remember_save("same", reply)
    header = worker_pb2.CommandHeader(run_id="run", epoch=1, request_id="same")
    save = Command("SaveCheckpoint", worker_pb2.SaveCheckpointRequest, lambda *_: Outcome())
    events = command_method(worker, save)(worker_pb2.SaveCheckpointRequest(header=header), None)
    assert (await anext(events)).result == reply
