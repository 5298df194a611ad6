"""A command and its reply: progress, silence, lost connections, and its duration."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from controller.workers.command import Limits, clock_offset_s
from splitppo.clock import unix_ns, unix_s
from splitppo.rpc.errors import (
    Busy,
    DeadlineExceeded,
    Internal,
    LimitExceeded,
    OutOfMemory,
    PeerDied,
    Place,
    Unavailable,
    WireError,
    WrongState,
    abort,
)
from splitppo.v1 import worker_pb2
from tests.support.fake_worker import Connect, Events, FakeWorker, generate, progress, result, succeed


async def test_a_command_forwards_progress_and_ends_in_its_reply(connect: Connect) -> None:
    async def script(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield progress(1)
        yield progress(2)
        yield result(metrics={"tokens": 7.0}, committed_step=4, replayed=True)

    seen: list[tuple[str, str, int]] = []
    client = await connect(
        FakeWorker([script]), on_progress=lambda role, method, event: seen.append((role, method, event.done))
    )

    reply = await generate(client)

    assert seen == [("actor", "Generate", 1), ("actor", "Generate", 2)]
    received = reply.result
    assert (dict(received.metrics), received.committed_step, received.replayed) == ({"tokens": 7.0}, 4, True)


@pytest.mark.parametrize("error_s", [-5.0, 0.0, 5.0], ids=["too early", "exact", "too late"])
async def test_engine_times_lie_between_request_and_reply_on_the_controllers_clock(
    connect: Connect, error_s: float
) -> None:
    ahead_ns = 1000 * 10**9

    async def script(worker: FakeWorker, request: Any, context: Any) -> Events:
        started_ns = unix_ns() + ahead_ns
        await asyncio.to_thread(hash, "")  # some work
        yield result(
            engine_time=worker_pb2.EngineTime(started_unix_ns=started_ns, finished_unix_ns=unix_ns() + ahead_ns)
        )

    worker = FakeWorker([script])
    worker.greeting.unix_ns = unix_ns() + ahead_ns + int(error_s * 1e9)
    client = await connect(worker)
    await client.handshake(timeout_s=10)

    sent_s = unix_s()
    reply = await generate(client)

    assert sent_s <= reply.started_s < reply.finished_s <= unix_s()


async def test_a_broken_command_is_sent_again_under_the_same_request_id(connect: Connect) -> None:
    async def break_off(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield progress(3)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")

    worker = FakeWorker([break_off, break_off, succeed])
    client = await connect(worker)

    await generate(client)

    assert len(worker.requests) == 3
    assert len({request.header.request_id for request in worker.requests}) == 1


async def test_a_worker_that_stays_away_is_given_up(connect: Connect) -> None:
    async def refuse(worker: FakeWorker, request: Any, context: Any) -> Events:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
        yield result()

    client = await connect(FakeWorker([refuse]), limits=Limits(reconnect_timeout_s=0.05))

    with pytest.raises(Unavailable, match=r"^actor rank 0, step 5, Generate: draining$"):
        await generate(client)


@pytest.mark.parametrize(
    "error",
    [
        WrongState("claimed by another run"),
        PeerDied("rank 1 died"),
        Internal("KeyError"),
        OutOfMemory("memory ran out"),
        LimitExceeded("it never fits"),
    ],
)
async def test_an_error_that_repeating_cannot_cure_is_raised_at_once(connect: Connect, error: WireError) -> None:
    async def refuse(worker: FakeWorker, request: Any, context: Any) -> Events:
        await abort(context, error.at(Place(role="actor", rank=1, phase="backward")))
        yield result()

    worker = FakeWorker([refuse])
    client = await connect(worker)

    with pytest.raises(type(error), match=rf"^actor rank 1, step 5, Generate \(backward\): {error.message}$"):
        await generate(client)
    assert len(worker.requests) == 1


@pytest.mark.parametrize("refusal", [Busy("the command queue holds 16 commands"), None], ids=["ours", "gRPC's own"])
async def test_a_command_that_was_refused_for_load_is_sent_again(connect: Connect, refusal: Busy | None) -> None:
    async def refuse(worker: FakeWorker, request: Any, context: Any) -> Events:
        if refusal:
            await abort(context, refusal)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
        yield result()

    worker = FakeWorker([refuse, refuse, succeed])
    client = await connect(worker)

    await generate(client)

    assert len({request.header.request_id for request in worker.requests}) == 1
    assert len(worker.requests) == 3


async def test_a_worker_that_stays_busy_is_given_up(connect: Connect) -> None:
    async def refuse(worker: FakeWorker, request: Any, context: Any) -> Events:
        await abort(context, Busy("no room"))
        yield result()

    client = await connect(FakeWorker([refuse]), limits=Limits(reconnect_timeout_s=0.05))

    with pytest.raises(Busy, match=r"^actor, step 5, Generate: no room$"):
        await generate(client)


async def test_a_stream_without_a_result_is_an_error(connect: Connect) -> None:
    async def stop(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield progress(3)

    client = await connect(FakeWorker([stop]))

    with pytest.raises(Internal, match=r"^actor, step 5, Generate \(decode\): the worker ended the command"):
        await generate(client)


async def hang(worker: FakeWorker, request: Any, context: Any) -> Events:
    yield progress(3)
    worker.status.running_method = "Generate"
    worker.status.progress.CopyFrom(progress(3).progress)
    await asyncio.Event().wait()


async def test_a_running_command_is_given_up_at_its_first_silence(connect: Connect) -> None:
    asked: list[worker_pb2.GetStatusResponse] = []
    client = await connect(FakeWorker([hang], on_status=asked.append), limits=Limits(progress_timeout_s=0.1))

    with pytest.raises(
        DeadlineExceeded,
        match=r"^actor, step 5, Generate \(decode\): the command made no progress for 0\.1 s; it had reached 3 of 10$",
    ):
        await generate(client)
    assert len(asked) == 1


async def test_a_queued_command_waits_while_the_worker_works_on_others(connect: Connect) -> None:
    finished = asyncio.Event()

    def others_advance(status: worker_pb2.GetStatusResponse) -> None:
        status.running_method = "Update"
        status.progress.done += 1
        if status.progress.done == 4:
            finished.set()

    async def wait_in_queue(worker: FakeWorker, request: Any, context: Any) -> Events:
        await finished.wait()
        yield result()

    worker = FakeWorker([wait_in_queue], on_status=others_advance)
    client = await connect(worker, limits=Limits(progress_timeout_s=0.02))

    await generate(client)

    assert len(worker.requests) == 1


async def test_a_queued_command_is_given_up_when_the_worker_stands_still(connect: Connect) -> None:
    async def wait_forever(worker: FakeWorker, request: Any, context: Any) -> Events:
        await asyncio.Event().wait()
        yield result()

    worker = FakeWorker([wait_forever], status=worker_pb2.GetStatusResponse(running_method="Update"))
    client = await connect(worker, limits=Limits(progress_timeout_s=0.05))

    with pytest.raises(DeadlineExceeded, match=r"made no progress for 0\.05 s and has not begun"):
        await generate(client)


async def test_cancelling_the_caller_ends_the_call(connect: Connect) -> None:
    left = asyncio.Event()
    begun = asyncio.Event()

    async def watch(worker: FakeWorker, request: Any, context: Any) -> Events:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        yield result()

    client = await connect(FakeWorker([watch]))
    calling = asyncio.create_task(generate(client))
    await begun.wait()
    calling.cancel()

    with pytest.raises(asyncio.CancelledError):
        await calling
    await asyncio.wait_for(left.wait(), 10)


@pytest.mark.parametrize(("worker_s", "offset_s"), [(10.0, 0.0), (10.9, 0.0), (12.0, 0.0), (71.0, 60.0), (9.0, -2.0)])
def test_clocks_that_a_slow_answer_cannot_tell_apart_are_taken_as_equal(worker_s: float, offset_s: float) -> None:
    assert clock_offset_s(worker_s, sent_s=10.0, answered_s=12.0) == offset_s
