"""A client of any role with a scripted worker: handshake, batches, checkpoints, request ids."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from controller.workers.clients import ActorClient, CriticClient, RewardClient, Traffic
from controller.workers.command import Limits
from splitppo.batch import Batch
from splitppo.rpc.errors import (
    Busy,
    InvalidArgument,
    NotIntroduced,
    Place,
    StaleEpoch,
    Unavailable,
    WrongState,
    WrongStep,
    abort,
)
from splitppo.v1 import actor_pb2, batch_pb2, reference_pb2, reward_model_pb2, teacher_pb2, worker_pb2
from tests.support.fake_worker import CALLER, SLOT, Connect, Events, FakeWorker, generate, result


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
    with pytest.raises(Unavailable, match=rf"cannot be reached within 2 s: {reason}"):
        await client.handshake(timeout_s=2)


async def test_an_unreachable_worker_is_named_with_its_address() -> None:
    client = ActorClient("127.0.0.1:1", CALLER)

    with pytest.raises(Unavailable, match=r"the actor at 127\.0\.0\.1:1 cannot be reached within 0\.3 s"):
        await client.handshake(timeout_s=0.3)
    await client.close()


async def test_a_batch_that_reaches_nobody_names_the_rank_that_was_called() -> None:
    client = ActorClient("127.0.0.1:1", CALLER, limits=Limits(reconnect_timeout_s=0.05))

    with pytest.raises(Unavailable, match=r"^actor rank 0, step 5, PutBatch: "):
        await client.put_batch(SLOT, Batch.from_rows(prompts=[[1]]))
    await client.close()


async def test_calls_that_are_refused_for_load_are_made_again(connect: Connect) -> None:
    worker = FakeWorker(refusals=[Busy("64 calls at a time"), Busy("64 calls at a time")])
    client = await connect(worker)

    await client.handshake(timeout_s=10)
    worker.refusals += [Busy("no room for a batch of 4 bytes"), Busy("no room for a batch of 4 bytes")]
    await client.put_batch(SLOT, Batch.from_rows(prompts=[[1]]))

    assert worker.slots[SLOT.step].num_rows == 1


async def test_a_worker_that_is_busy_is_waited_for_at_the_handshake(connect: Connect) -> None:
    refusals = [Busy("64 calls at a time"), Busy("64 calls at a time")]

    def refuse(_: worker_pb2.GetStatusResponse) -> None:
        if refusals:
            raise refusals.pop()

    worker = FakeWorker(on_status=refuse)
    client = await connect(worker)

    await client.handshake(timeout_s=10)

    assert len(worker.requests) == 1


async def test_a_refused_handshake_is_not_repeated(connect: Connect) -> None:
    worker = FakeWorker(refusals=[StaleEpoch("epoch 3 holds this worker", Place(role="actor"))])
    client = await connect(worker)

    with pytest.raises(StaleEpoch, match="actor, Handshake: epoch 3 holds this worker"):
        await client.handshake(timeout_s=10)
    assert len(worker.requests) == 1


async def test_a_worker_of_another_role_is_refused(connect: Connect) -> None:
    worker = FakeWorker()
    worker.greeting.role = worker_pb2.ROLE_CRITIC
    client = await connect(worker)

    with pytest.raises(WrongState, match="is a critic, expected the actor"):
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


async def test_a_refusal_is_heard_while_a_batch_is_still_being_sent(connect: Connect) -> None:
    worker = FakeWorker()
    client = await connect(worker)
    batch = Batch.from_rows(prompts=[[1] * 100_000] * 20)
    for _ in range(40):  # in some of them gRPC's client puts a status of its own in the place of the worker's
        worker.refusals = [NotIntroduced("it was started again")] * 1000
        with pytest.raises(NotIntroduced, match=r"^actor, step 5, PutBatch: it was started again$"):
            await client.put_batch(SLOT, batch)


async def test_a_malformed_answer_is_an_error_that_names_the_worker(connect: Connect) -> None:
    worker = FakeWorker(slots={5: Batch.from_rows(prompts=[[1]])}, refusals=[Unavailable("spoils the header")])
    client = await connect(worker)

    with pytest.raises(ValueError, match=r"^actor, step 5, GetBatch: column 'prompts' has 1 row lengths"):
        await client.get_batch(SLOT, ["prompts"])


async def test_each_command_has_its_own_request_id_and_two_clients_agree_on_it(connect: Connect) -> None:
    async def all_commands(worker: FakeWorker) -> list[str]:
        actor: ActorClient = await connect(worker)
        critic: Any = await connect(worker, CriticClient)
        await generate(actor)
        await actor.compute_log_probs(SLOT, base_step=4)
        await actor.compute_ref_log_probs(SLOT, base_step=4)
        await critic.compute_values(SLOT, base_step=4)
        await critic.compute_reward_scores(SLOT, base_step=4)
        await critic.compute_teacher_log_probs(SLOT, base_step=4, num_ids=50)
        await actor.update(SLOT, base_step=4)
        await actor.save_checkpoint(base_step=5)
        await actor.compute_weights_digest()
        for part in (0, 1):
            slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=5, part=part)
            await actor.generate(slot, actor_pb2.SamplingParams(), base_step=5)
        return [request.header.request_id for request in worker.requests]

    first, second = await all_commands(FakeWorker()), await all_commands(FakeWorker())

    assert first == second
    assert len(set(first)) == 11


@pytest.mark.parametrize("kind", [ActorClient, CriticClient])
async def test_the_reference_is_called_by_its_own_service_whichever_group_hosts_it(connect: Connect, kind: Any) -> None:
    worker = FakeWorker()
    client: Any = await connect(worker, kind)

    await client.compute_ref_log_probs(SLOT, base_step=4)

    (request,) = worker.requests
    assert isinstance(request, reference_pb2.ComputeRefLogProbsRequest)
    assert (request.slot, request.header.base_step) == (SLOT, 4)


@pytest.mark.parametrize("kind", [ActorClient, CriticClient])
async def test_the_reward_model_is_called_by_its_own_service(connect: Connect, kind: Any) -> None:
    worker = FakeWorker()
    client: Any = await connect(worker, kind)

    await client.compute_reward_scores(SLOT, base_step=4)

    (request,) = worker.requests
    assert isinstance(request, reward_model_pb2.ComputeRewardScoresRequest)
    assert (request.slot, request.header.base_step) == (SLOT, 4)


@pytest.mark.parametrize("kind", [ActorClient, CriticClient, RewardClient])
async def test_the_teachers_are_called_by_their_own_service_whichever_group_hosts_them(
    connect: Connect, kind: Any
) -> None:
    worker = FakeWorker()
    client: Any = await connect(worker, kind)

    await client.compute_teacher_log_probs(SLOT, base_step=4, num_ids=50)

    (request,) = worker.requests
    assert isinstance(request, teacher_pb2.ComputeTeacherLogProbsRequest)
    assert (request.slot, request.num_ids, request.header.base_step) == (SLOT, 50, 4)


async def test_headers_carry_run_epoch_and_base_step(connect: Connect) -> None:
    worker = FakeWorker()
    client = await connect(worker)

    await client.update(SLOT, base_step=4, total_steps=9, advance_only=True)

    (request,) = worker.requests
    assert (request.header.run_id, request.header.epoch, request.header.base_step) == ("run", 2, 4)
    assert (request.slot, request.advance_only, request.total_steps) == (SLOT, True, 9)


async def test_a_checkpoint_that_is_durable_after_the_next_update_takes_no_step_back(connect: Connect) -> None:
    steps = {"Update": 6, "SaveCheckpoint": 5}

    async def commit(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield result(committed_step=steps["Update" if hasattr(request, "advance_only") else "SaveCheckpoint"])

    client = await connect(FakeWorker([commit]))
    await client.update(SLOT, advance_only=False, base_step=5)
    reply = await client.save_checkpoint(base_step=5)
    assert reply.result.committed_step == 5
    assert client.committed_step == 6


async def test_loading_takes_over_from_an_update_that_commits_in_between(connect: Connect) -> None:
    async def refuse(worker: FakeWorker, request: Any, context: Any) -> Events:
        worker.status.committed_step = 6
        await abort(context, WrongStep("committed step is 6"))
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
