"""Answers of the gRPC thread, without a server."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from services.runtime.command import Command, Effect, Outcome, Rows
from services.runtime.rpc.servicer import WorkerServicer, command_method
from services.runtime.state.command_call import CommandCall, StoredReply
from services.runtime.state.worker import Worker
from splitppo import __version__
from splitppo.batch import MAX_BATCH_ROWS, AnyColumn, Batch, Column, RowStore, SharedColumn, held_bytes
from splitppo.columns import spec_of
from splitppo.rpc.codec import WIRE_COLUMNS
from splitppo.rpc.errors import Busy, InvalidArgument, LimitExceeded, StaleEpoch, Unavailable, WrongState
from splitppo.rpc.request_id import PROTOCOL_VERSION
from splitppo.v1 import actor_pb2, batch_pb2, worker_pb2
from tests.support.batch_streams import encode
from tests.unit.runtime.rpc.workers import make_worker

SLOT = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1)


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
    generate = Command("Generate", actor_pb2.GenerateRequest, Effect.WRITES_SLOT, lambda *_: Outcome())
    header = worker_pb2.CommandHeader(run_id="run", epoch=1, request_id="one")
    request = actor_pb2.GenerateRequest(header=header, slot=SLOT)
    serve = command_method(worker, generate)
    events = serve(request, None)
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    call = worker.command_queue.take(0.0)
    assert call is not None
    call.announce(worker_pb2.CommandEvent(part=worker_pb2.PartReady(part=2, num_parts=2)))
    assert (await first).part.part == 2
    late = serve(request, None)
    assert (await anext(late)).part.part == 2
    call.announce(worker_pb2.CommandEvent(part=worker_pb2.PartReady(part=1, num_parts=2)))
    call.resolve(worker_pb2.CommandResult(policy_version=4))
    for stream in (events, late):
        *parts, last = [event async for event in stream]
        assert [event.part.part for event in parts] == [1]
        assert last.result.policy_version == 4


async def test_a_newer_controller_refuses_what_waits_for_the_older_one(worker: Worker, tmp_path: Path) -> None:
    header = worker_pb2.CommandHeader(run_id="run", epoch=1, request_id="one")
    request = worker_pb2.ComputeWeightsDigestRequest(header=header)
    digest = Command("ComputeWeightsDigest", type(request), Effect.READS, lambda *_: Outcome())
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
    worker.ledger.remember_save("save-5", StoredReply("", worker_pb2.CommandResult(committed_step=5)))
    assert worker.ledger.reply_of_save("save-5") is not None
    worker.ledger.restore(b"", 0)
    assert worker.ledger.reply_of_save("save-5") is None


async def test_a_reply_that_is_kept_answers_its_own_method_only(worker: Worker) -> None:
    worker.ledger.remember_save("same", StoredReply("", worker_pb2.CommandResult()))
    header = worker_pb2.CommandHeader(run_id="run", epoch=1, request_id="same")
    load = Command("LoadCheckpoint", worker_pb2.LoadCheckpointRequest, Effect.LOADS, lambda *_: Outcome())
    events = command_method(worker, load)(worker_pb2.LoadCheckpointRequest(header=header), None)
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert (worker.command_queue.num_queued, waiting.done()) == (1, False)
    waiting.cancel()


async def test_a_reply_that_is_kept_answers_the_save_that_it_is_of(worker: Worker) -> None:
    reply = worker_pb2.CommandResult(committed_step=1)
    worker.ledger.remember_save("same", StoredReply("", reply))
    header = worker_pb2.CommandHeader(run_id="run", epoch=1, request_id="same")
    save = Command("SaveCheckpoint", worker_pb2.SaveCheckpointRequest, Effect.SAVES, lambda *_: Outcome())
    events = command_method(worker, save)(worker_pb2.SaveCheckpointRequest(header=header), None)
    assert (await anext(events)).result == reply


async def test_a_batch_on_its_way_takes_as_much_room_as_it_will_hold(tmp_path: Path) -> None:
    """Rows of no values at all have their lengths, and those of every column."""
    batch = Batch.from_rows(**{name: [[]] * 1000 for name in ("prompts", "responses", "values")})
    worker = make_worker(tmp_path, max_batch_bytes=1, max_held_bytes=4 * held_bytes([batch]) + 1)
    header, _ = encode(batch, SLOT)
    num_open = 0

    async def stream() -> AsyncIterator[bytes]:
        nonlocal num_open
        opening = worker_pb2.PutBatchHeader(run_id="run", epoch=1, batch=header)
        yield worker_pb2.PutBatchRequest(header=opening).SerializeToString()
        num_open += 1
        await asyncio.Event().wait()

    coming = [asyncio.ensure_future(WorkerServicer(worker).put_batch(stream(), None)) for _ in range(5)]
    done, waiting = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
    assert (num_open, len(waiting)) == (4, 4)
    with pytest.raises(Busy, match="max_held_bytes"):
        done.pop().result()
    for call in waiting:
        call.cancel()
    await asyncio.wait(waiting)
    with worker.slots.reserved(worker.context.config.services.max_held_bytes):
        pass


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_batches_on_their_way_take_no_more_memory_than_is_counted(tmp_path: Path) -> None:
    """Their headers are parsed, and let go of: as protobuf's objects they are larger than what they announce."""
    lengths = np.zeros(MAX_BATCH_ROWS, np.int32)
    columns: dict[str, AnyColumn] = {}
    for name in WIRE_COLUMNS:
        column = Column(np.empty(0, spec_of(name).dtype), lengths)
        if spec_of(name).is_shared:
            columns[name] = SharedColumn(RowStore((column,)), np.arange(MAX_BATCH_ROWS, dtype=np.int32))
        elif spec_of(name).kind != "one_per_row":
            columns[name] = column
    batch = Batch(MAX_BATCH_ROWS, columns)
    worker = make_worker(tmp_path)
    header, _ = encode(batch, SLOT)
    opening = worker_pb2.PutBatchHeader(run_id="run", epoch=1, batch=header)
    message = worker_pb2.PutBatchRequest(header=opening).SerializeToString()
    barrier = asyncio.Barrier(8 + 1)

    async def stream() -> AsyncIterator[bytes]:
        yield bytes(bytearray(message))
        await barrier.wait()
        await asyncio.Event().wait()

    before = resident_bytes()
    puts = [asyncio.ensure_future(WorkerServicer(worker).put_batch(stream(), None)) for _ in range(8)]
    await barrier.wait()
    grown = resident_bytes() - before
    for put in puts:
        put.cancel()
    await asyncio.wait(puts)
    assert grown < 2 * len(puts) * held_bytes([batch])


UPDATE = Command("Update", actor_pb2.ActorUpdateRequest, Effect.TRAINS, lambda *_: Outcome())
SAVE = Command("SaveCheckpoint", worker_pb2.SaveCheckpointRequest, Effect.SAVES, lambda *_: Outcome())
LOG_PROBS = Command(
    "ComputeLogProbs",
    actor_pb2.ComputeLogProbsRequest,
    Effect.WRITES_SLOT,
    lambda *_: Outcome(),
    Rows(columns=("prompts",)),
)


def keep(worker: Worker, command: Command, request: Any, reply: worker_pb2.CommandResult) -> None:
    """Stores the reply, as when the command was finished."""
    call = CommandCall(command, request)
    assert worker.ledger is not None
    if command is UPDATE:
        worker.ledger.commit(1, call.request_id, call.stored(reply))
    elif command is SAVE:
        worker.ledger.remember_save(call.request_id, call.stored(reply))
    else:
        worker.slots.put(SLOT, Batch.from_rows(prompts=[[1]]), 0)
        made = Batch.from_rows(old_log_probs=[[0.5]])
        worker.slots.absorb(request.slot, made, call.reply_key, call.stored(reply))


@pytest.mark.parametrize(
    ("command", "fields", "other"),
    [
        (UPDATE, {"slot": SLOT}, {"slot": SLOT, "advance_only": True}),
        (SAVE, {}, {"with_hf_model": True}),
        (LOG_PROBS, {"slot": SLOT}, {"header": {"base_step": 7}, "slot": SLOT}),
    ],
    ids=["an update", "a checkpoint", "log-probs"],
)
async def test_a_stored_reply_is_that_of_the_very_same_request(
    worker: Worker, command: Command, fields: dict[str, Any], other: dict[str, Any]
) -> None:
    def request(**fields: Any) -> Any:
        header = {"run_id": "run", "epoch": worker.fencing.epoch, "request_id": "same", **fields.pop("header", {})}
        return command.request_type(header=header, **fields)

    serve, reply = command_method(worker, command), worker_pb2.CommandResult(metrics={"loss": 1.0})
    keep(worker, command, request(**fields), reply)
    with pytest.raises(InvalidArgument, match=rf"'same' belongs to another request than this {command.method}"):
        await anext(serve(request(**other), None))
    worker.fencing.take("run", 2)
    assert (await anext(serve(request(**fields), None))).result.metrics == reply.metrics
