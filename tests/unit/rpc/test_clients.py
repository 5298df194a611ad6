"""The controller's clients against a real gRPC server in this process that plays a worker."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from controller.clients import ActorClient, Caller, CriticClient, Limits, Traffic
from splitppo.batch import Batch
from splitppo.rpc.codec import encode, receive_batch
from splitppo.rpc.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    PeerDied,
    Place,
    StaleEpoch,
    Unavailable,
    WireError,
    WrongPolicy,
    WrongState,
    WrongStep,
    status_of,
)
from splitppo.rpc.options import SERVER_OPTIONS
from splitppo.v1 import actor_pb2, actor_pb2_grpc, batch_pb2, critic_pb2_grpc, worker_pb2, worker_pb2_grpc

SLOT = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=5)
CALLER = Caller(run_id="run", epoch=2, config_digest="d" * 64, nonce="nonce")
Events = AsyncIterator[worker_pb2.CommandEvent]
Script = Callable[["FakeWorker", Any, grpc.aio.ServicerContext[Any, Any]], Events]


async def fail(context: grpc.aio.ServicerContext[Any, Any], error: WireError) -> None:
    status = status_of(error)
    await context.abort(status.code, status.details, status.trailing_metadata)


def progress(done: int, phase: str = "decode") -> worker_pb2.CommandEvent:
    return worker_pb2.CommandEvent(progress=worker_pb2.Progress(done=done, total=10, phase=phase))


def part(number: int, policy_version: int = 4) -> worker_pb2.CommandEvent:
    return worker_pb2.CommandEvent(part=worker_pb2.PartReady(part=number, num_parts=2, policy_version=policy_version))


def result(**fields: Any) -> worker_pb2.CommandEvent:
    return worker_pb2.CommandEvent(result=worker_pb2.CommandResult(**{"policy_version": 4, **fields}))


async def succeed(worker: "FakeWorker", request: Any, context: Any) -> Events:
    yield result(committed_step=4, policy_version=request.header.base_step)


@dataclass
class FakeWorker(
    worker_pb2_grpc.WorkerServiceServicer, actor_pb2_grpc.ActorServiceServicer, critic_pb2_grpc.CriticServiceServicer
):
    """Answers commands by script: one entry per attempt, the last one from then on."""

    scripts: list[Script] = field(default_factory=lambda: [succeed])
    status: worker_pb2.GetStatusResponse = field(default_factory=worker_pb2.GetStatusResponse)
    greeting: worker_pb2.HandshakeResponse = field(
        default_factory=lambda: worker_pb2.HandshakeResponse(
            protocol_version=1, role=worker_pb2.ROLE_ACTOR, config_digest="d" * 64, unix_ns=time.time_ns()
        )
    )
    refusals: list[WireError] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    slots: dict[int, Batch] = field(default_factory=dict)
    on_status: Callable[[worker_pb2.GetStatusResponse], None] = lambda status: None

    async def Handshake(self, request: Any, context: Any) -> worker_pb2.HandshakeResponse:
        self.requests.append(request)
        if self.refusals:
            await fail(context, self.refusals.pop(0))
        return self.greeting

    async def GetStatus(self, request: Any, context: Any) -> worker_pb2.GetStatusResponse:
        self.on_status(self.status)
        return self.status

    async def PutBatch(self, parts: Any, context: Any) -> worker_pb2.PutBatchResponse:
        if self.refusals:
            await fail(context, self.refusals.pop(0))
        header, batch = await receive_batch(parts, 1 << 30, lambda header: header.batch)
        self.slots[header.slot.step] = batch
        return worker_pb2.PutBatchResponse(received_bytes=batch.num_bytes)

    async def GetBatch(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.GetBatchResponse]:
        header, chunks = encode(self.slots[request.slot.step].select(request.columns), request.slot)
        if self.refusals:
            header.num_rows += 1
        yield worker_pb2.GetBatchResponse(header=header)
        for chunk in chunks:
            yield worker_pb2.GetBatchResponse(chunk=chunk)

    async def _command(self, request: Any, context: Any) -> Events:
        self.requests.append(request)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        async for event in script(self, request, context):
            yield event

    Generate = ComputeLogProbs = ComputeValues = Update = _command
    SaveCheckpoint = LoadCheckpoint = ComputeWeightsDigest = _command


Connect = Callable[..., Awaitable[ActorClient]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Serves a fake worker and gives a client of it."""
    opened: list[Any] = []

    async def serve(worker: FakeWorker, kind: Any = ActorClient, *, caller: Caller = CALLER, **options: Any) -> Any:
        server = grpc.aio.server(options=list(SERVER_OPTIONS))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
        actor_pb2_grpc.add_ActorServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
        critic_pb2_grpc.add_CriticServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        client = kind(f"127.0.0.1:{port}", caller, **options)
        opened.append((client, server))
        return client

    yield serve
    for client, server in opened:
        await client.close()
        await server.stop(0)


async def generate(client: ActorClient, **options: Any) -> Any:
    return await client.generate(SLOT, actor_pb2.SamplingParams(), base_step=4, **options)


# Handshake.


async def test_handshake_introduces_the_controller_and_learns_the_committed_step(connect: Connect) -> None:
    worker = FakeWorker()
    worker.greeting.committed_step = 7
    client = await connect(worker)

    await client.handshake(timeout_s=10)

    (request,) = worker.requests
    assert (request.protocol_version, request.run_id, request.epoch) == (1, "run", 2)
    assert (request.config_digest, request.nonce) == ("d" * 64, "nonce")
    assert client.committed_step == 7


async def test_handshake_waits_for_a_worker_that_is_not_ready_yet(connect: Connect) -> None:
    worker = FakeWorker(refusals=[Unavailable("starting"), Unavailable("starting")])
    client = await connect(worker)

    await client.handshake(timeout_s=10)

    assert len(worker.requests) == 3


LEAVING = [worker_pb2.WORKER_STATE_DRAINING, worker_pb2.WORKER_STATE_FAILED]


@pytest.mark.parametrize("state", LEAVING)
async def test_handshake_waits_for_the_successor_of_a_worker_that_leaves(connect: Connect, state: Any) -> None:
    states = [state, state, worker_pb2.WORKER_STATE_IDLE]
    worker = FakeWorker(on_status=lambda status: setattr(status, "state", states.pop(0) if states[1:] else states[0]))
    client = await connect(worker)
    await client.handshake(timeout_s=10)
    assert states == [worker_pb2.WORKER_STATE_IDLE]
    assert len(worker.requests) == 1


@pytest.mark.parametrize(
    ("state", "reason"), [*zip(LEAVING, ["it is draining", "it has failed and ends"], strict=True)]
)
async def test_a_worker_that_leaves_and_has_no_successor_is_given_up(connect: Connect, state: Any, reason: str) -> None:
    client = await connect(FakeWorker(status=worker_pb2.GetStatusResponse(state=state)))
    with pytest.raises(Unavailable, match=rf"cannot be reached within 0\.3 s: {reason}"):
        await client.handshake(timeout_s=0.3)


async def test_an_unreachable_worker_is_named_with_its_address() -> None:
    client = ActorClient("127.0.0.1:1", CALLER)

    with pytest.raises(Unavailable, match=r"the actor at 127\.0\.0\.1:1 cannot be reached within 0\.3 s"):
        await client.handshake(timeout_s=0.3)
    await client.close()


async def test_a_refused_handshake_is_not_repeated(connect: Connect) -> None:
    worker = FakeWorker(refusals=[StaleEpoch("epoch 3 holds this worker", Place(role="actor"))])
    client = await connect(worker)

    with pytest.raises(StaleEpoch, match="actor, Handshake: epoch 3 holds this worker"):
        await client.handshake(timeout_s=10)
    assert len(worker.requests) == 1


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"role": worker_pb2.ROLE_CRITIC}, "is a critic, expected the actor"),
        ({"protocol_version": 99}, "speaks protocol 99"),
        (
            {"config_digest": "e" * 64},
            "another configuration: its digest is eeeeeeeeeeee, the controller's dddddddddddd",
        ),
    ],
)
async def test_another_worker_than_the_one_meant_is_refused(
    connect: Connect, fields: dict[str, Any], sentence: str
) -> None:
    worker = FakeWorker()
    worker.greeting.MergeFrom(worker_pb2.HandshakeResponse(**fields))
    client = await connect(worker)

    with pytest.raises(WrongState, match=sentence):
        await client.handshake(timeout_s=10)


@pytest.mark.parametrize(
    ("committed_step", "state", "step", "fresh"),
    [
        (0, worker_pb2.WORKER_STATE_IDLE, 0, True),
        (0, worker_pb2.WORKER_STATE_DIRTY, 0, False),
        (3, worker_pb2.WORKER_STATE_IDLE, 3, False),
        (3, worker_pb2.WORKER_STATE_IDLE, 0, False),
    ],
)
async def test_only_an_untouched_initial_model_needs_no_restore(
    connect: Connect, committed_step: int, state: worker_pb2.WorkerState, step: int, fresh: bool
) -> None:
    worker = FakeWorker(status=worker_pb2.GetStatusResponse(state=state, committed_step=committed_step))
    worker.greeting.committed_step = committed_step
    client = await connect(worker)
    await client.handshake(timeout_s=10)

    assert client.is_fresh_at(step) is fresh


@pytest.mark.parametrize(
    "left_behind",
    [
        {"state": worker_pb2.WORKER_STATE_BUSY, "running_method": "Update"},
        {"state": worker_pb2.WORKER_STATE_IDLE, "committed_step": 1},
        {"state": worker_pb2.WORKER_STATE_IDLE, "slots": [SLOT]},
    ],
    ids=["an update that still runs", "an update that ended after the handshake", "rows of a step that was given up"],
)
async def test_what_an_earlier_controller_left_behind_needs_a_restore(
    connect: Connect, left_behind: dict[str, Any]
) -> None:
    client = await connect(FakeWorker(status=worker_pb2.GetStatusResponse(**left_behind)))
    await client.handshake(timeout_s=10)

    assert not client.is_fresh_at(0)


# Data.


async def test_a_batch_comes_back_as_it_was_put(connect: Connect) -> None:
    worker = FakeWorker()
    client = await connect(worker)
    responses = np.arange(700_000, dtype=np.int32)
    batch = Batch.from_rows(prompts=[[1], [2, 3]], responses=[responses, []], values=[responses / 2, []])

    await client.put_batch(SLOT, batch)
    received = await client.get_batch(SLOT, ["values", "responses"])

    assert set(received.columns) == {"values", "responses"}
    np.testing.assert_array_equal(received["responses"].values, responses)
    np.testing.assert_array_equal(received["values"].values, batch["values"].values)


async def test_traffic_counts_column_bytes_in_both_directions(connect: Connect) -> None:
    client = await connect(FakeWorker())
    before = client.traffic
    await client.put_batch(SLOT, Batch.from_rows(prompts=[[1, 2, 3]], responses=[[4]]))
    await client.get_batch(SLOT, ["responses"])

    spent = client.traffic - before

    assert (spent.bytes_sent, spent.bytes_received) == (16, 4)
    assert spent.transfer_s > 0
    assert Traffic(1, 2, 3.0) + Traffic(1, 1, 1.0) == Traffic(2, 3, 4.0)


async def test_a_put_that_finds_the_worker_away_is_made_again(connect: Connect) -> None:
    worker = FakeWorker(refusals=[Unavailable("away")])
    client = await connect(worker)

    await client.put_batch(SLOT, Batch.from_rows(prompts=[[1, 2, 3]]))

    assert worker.slots[5]["prompts"].values.tolist() == [1, 2, 3]


async def test_a_refused_put_names_role_step_and_method(connect: Connect) -> None:
    client = await connect(FakeWorker(refusals=[InvalidArgument("rows differ")]))

    with pytest.raises(InvalidArgument, match=r"^actor, step 5, PutBatch: rows differ$"):
        await client.put_batch(SLOT, Batch.from_rows(prompts=[[1]]))


async def test_a_malformed_answer_is_an_error_that_names_the_worker(connect: Connect) -> None:
    worker = FakeWorker(slots={5: Batch.from_rows(prompts=[[1]])}, refusals=[Unavailable("spoils the header")])
    client = await connect(worker)

    with pytest.raises(ValueError, match=r"^actor, step 5, GetBatch: column 'prompts' has 1 row lengths"):
        await client.get_batch(SLOT, ["prompts"])


# Commands.


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
    assert (reply.metrics, reply.committed_step, reply.replayed) == ({"tokens": 7.0}, 4, True)


async def test_a_streamed_generation_tells_of_every_part_again_after_a_lost_connection(connect: Connect) -> None:
    async def break_off(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield progress(1)
        yield part(2)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")

    async def go_on(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield part(2)
        yield progress(2)
        yield part(1)
        yield result()

    worker, ready, seen = FakeWorker([break_off, go_on]), [], []
    client = await connect(worker, on_progress=lambda role, method, event: seen.append(event.done))

    reply = await generate(client, num_parts=2, on_part=ready.append)

    assert ready == [2, 2, 1]
    assert seen == [1, 2]
    assert reply.policy_version == 4
    assert [request.num_parts for request in worker.requests] == [2, 2]


async def test_a_generation_that_is_not_streamed_asks_for_no_parts(connect: Connect) -> None:
    worker = FakeWorker()
    await generate(await connect(worker))
    assert worker.requests[0].num_parts == 0


@pytest.mark.parametrize("first", [part(1, policy_version=3), result(policy_version=3)], ids=["part", "result"])
async def test_responses_of_other_weights_are_refused_with_both_numbers(
    connect: Connect, first: worker_pb2.CommandEvent
) -> None:
    async def script(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield first
        yield result()

    ready: list[int] = []
    with pytest.raises(WrongPolicy, match=r"^actor, step 5, Generate: .*weights of step 3, expected those of step 4$"):
        await generate(await connect(FakeWorker([script])), num_parts=2, on_part=ready.append)
    assert not ready


@pytest.mark.parametrize("error_s", [-5.0, 0.0, 5.0], ids=["too early", "exact", "too late"])
async def test_engine_times_lie_between_request_and_reply_on_the_controllers_clock(
    connect: Connect, error_s: float
) -> None:
    ahead_ns = 1000 * 10**9

    async def script(worker: FakeWorker, request: Any, context: Any) -> Events:
        started_ns = time.time_ns() + ahead_ns
        await asyncio.to_thread(hash, "")  # some work
        yield result(
            engine_time=worker_pb2.EngineTime(started_unix_ns=started_ns, finished_unix_ns=time.time_ns() + ahead_ns)
        )

    worker = FakeWorker([script])
    worker.greeting.unix_ns = time.time_ns() + ahead_ns + int(error_s * 1e9)
    client = await connect(worker)
    await client.handshake(timeout_s=10)

    sent_s = time.time()
    reply = await generate(client)

    assert sent_s <= reply.started_s < reply.finished_s <= time.time()


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


@pytest.mark.parametrize("error", [WrongState("claimed by another run"), PeerDied("rank 1 died"), Internal("KeyError")])
async def test_an_error_that_repeating_cannot_cure_is_raised_at_once(connect: Connect, error: WireError) -> None:
    async def refuse(worker: FakeWorker, request: Any, context: Any) -> Events:
        await fail(context, error.at(Place(role="actor", rank=1, phase="backward")))
        yield result()

    worker = FakeWorker([refuse])
    client = await connect(worker)

    with pytest.raises(type(error), match=rf"^actor rank 1, step 5, Generate \(backward\): {error.message}$"):
        await generate(client)
    assert len(worker.requests) == 1


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

    async def wait_in_mailbox(worker: FakeWorker, request: Any, context: Any) -> Events:
        await finished.wait()
        yield result()

    worker = FakeWorker([wait_in_mailbox], on_status=others_advance)
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


async def test_each_command_has_its_own_request_id_and_two_clients_agree_on_it(connect: Connect) -> None:
    async def all_commands(worker: FakeWorker) -> list[str]:
        actor: ActorClient = await connect(worker)
        critic: Any = await connect(worker, CriticClient)
        await generate(actor)
        for model in (actor_pb2.POLICY_MODEL_POLICY, actor_pb2.POLICY_MODEL_REFERENCE):
            await actor.compute_log_probs(SLOT, model, base_step=4)
        await critic.compute_values(SLOT, base_step=4)
        await actor.update(SLOT, base_step=4)
        await actor.save_checkpoint(base_step=5)
        await actor.compute_weights_digest()
        for part in (0, 1):
            slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=5, part=part)
            await actor.generate(slot, actor_pb2.SamplingParams(), base_step=5)
        return [request.header.request_id for request in worker.requests]

    first, second = await all_commands(FakeWorker()), await all_commands(FakeWorker())

    assert first == second
    assert len(set(first)) == 9


async def test_headers_carry_run_epoch_and_base_step(connect: Connect) -> None:
    worker = FakeWorker()
    client = await connect(worker)

    await client.update(SLOT, base_step=4, advance_only=True)

    (request,) = worker.requests
    assert (request.header.run_id, request.header.epoch, request.header.base_step) == ("run", 2, 4)
    assert (request.slot, request.advance_only) == (SLOT, True)


async def test_a_checkpoint_that_is_durable_after_the_next_update_takes_no_step_back(connect: Connect) -> None:
    steps = {"Update": 6, "SaveCheckpoint": 5}

    async def commit(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield result(committed_step=steps["Update" if hasattr(request, "advance_only") else "SaveCheckpoint"])

    client = await connect(FakeWorker([commit]))
    await client.update(SLOT, advance_only=False, base_step=5)
    reply = await client.save_checkpoint(base_step=5)
    assert reply.committed_step == 5
    assert client.committed_step == 6


async def test_loading_takes_over_from_an_update_that_commits_in_between(connect: Connect) -> None:
    async def refuse(worker: FakeWorker, request: Any, context: Any) -> Events:
        worker.status.committed_step = 6
        await fail(context, WrongStep("committed step is 6"))
        yield result()

    async def load(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield result(committed_step=request.step)

    worker = FakeWorker([refuse, load], status=worker_pb2.GetStatusResponse(committed_step=5))
    client = await connect(worker)

    await client.load_checkpoint(3)

    assert [request.header.base_step for request in worker.requests] == [5, 6]
    assert client.committed_step == 3


async def test_a_command_replayed_after_a_restore_is_another_command(connect: Connect) -> None:
    worker = FakeWorker()
    client = await connect(worker)

    await generate(client)
    await client.load_checkpoint(4)
    await generate(client)

    before, _, after = [request.header.request_id for request in worker.requests]
    assert before != after


async def test_a_command_replayed_over_a_new_connection_is_another_command(connect: Connect) -> None:
    worker = FakeWorker()

    for connection in (1, 2):
        client = await connect(worker, caller=replace(CALLER, connection=connection))
        await client.load_checkpoint(4)
        await client.save_checkpoint(base_step=5)

    assert len({request.header.request_id for request in worker.requests}) == 4


async def test_the_weights_digest_is_the_workers(connect: Connect) -> None:
    async def digest(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield result(weights_sha256="ab" * 32)

    client = await connect(FakeWorker([digest]))

    assert await client.compute_weights_digest() == "ab" * 32
