"""A service of one rank over real gRPC. The tests share a group; each goes on from the step that it finds."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitppo.config.threads import threads_of_rank
from splitppo.machine.cores import permitted_cores
from splitppo.rpc.errors import (
    CorruptBatch,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    OutOfMemory,
    StaleEpoch,
    WireError,
    WrongState,
    WrongStep,
    error_from_rpc,
)
from splitppo.v1 import batch_pb2, critic_pb2, worker_pb2
from tests.integration.runtime import toy
from tests.integration.runtime.client import Client, error_of, experience, progress, result
from tests.integration.runtime.conftest import StartToy, Toy
from tests.support.groups import wait_until
from tests.support.reflection import REFLECTION, list_services

PROMPTS = [[1, 2, 3], [4], [5, 6], [7] * 9]
RESPONSES = [[1], [2, 3], [4, 5, 6], [7, 8]]
RETURNS = [[0.5], [0.5, 0.5], [0.5] * 3, [0.5] * 2]


@pytest.fixture(scope="module")
def service(start_module_toy: StartToy) -> Toy:
    return start_module_toy(max_queued_commands=2, max_batch_bytes=1 << 20)


@pytest.fixture
def client(service: Toy) -> Client:
    return service.client


@pytest.fixture
def step(client: Client) -> int:
    """The next step, with its experience in the slot."""
    step = client.status().committed_step + 1
    client.put(experience(step), prompts=PROMPTS, responses=RESPONSES, returns=RETURNS)
    return step


def prompts_that(order: int) -> list[list[int]]:
    return [[order], [4], [5, 6], [7]]


@pytest.fixture
def blocked(service: Toy, client: Client, step: int) -> object:
    """A command that runs until the test releases it; (stream, request id)."""
    (service.run_dir / "go").unlink(missing_ok=True)
    client.put(experience(step), prompts=prompts_that(toy.BLOCK))
    stream = client.compute_values(experience(step), base_step=step - 1, request_id=f"blocked-{step}")
    assert progress(stream).phase == "blocked"
    yield stream, f"blocked-{step}"
    (service.run_dir / "go").touch()
    wait_until(lambda: client.status().state == worker_pb2.WORKER_STATE_IDLE, what="idle again")


def test_the_handshake_says_who_the_worker_is(service: Toy, client: Client) -> None:
    answer = client.handshake()
    assert (answer.role, answer.world_size, answer.num_parameters) == (worker_pb2.ROLE_CRITIC, 1, 1)
    assert answer.instance_id == service.group.instance_id
    assert [process.pid for process in answer.processes] == service.group.pids


def test_a_group_that_others_start_computes_with_threads_for_its_own_cores(service: Toy, client: Client) -> None:
    num_threads = threads_of_rank(client.config.services.critic, 1, permitted_cores())
    assert f"rank 0 of 1 on cpu, {num_threads} threads" in (service.run_dir / "logs" / "critic_0.log").read_text()


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"protocol_version": 99}, WrongState, r"the controller has version .* \(protocol 99\), this worker"),
        ({"software_version": "0.0.9"}, WrongState, "the controller has version 0.0.9 .*: install the same version"),
        ({"config_digest": "other"}, WrongState, "restart the worker with the controller's configuration"),
        ({"nonce": "never-written"}, WrongState, "storage that the controller and all ranks share"),
        ({"nonce": "../config.yaml"}, InvalidArgument, "name of a file"),
        ({"run_id": ""}, InvalidArgument, "needs a run id"),
        ({"run_id": "another"}, WrongState, "belongs to run"),
    ],
)
def test_a_controller_that_does_not_fit_is_told_why(
    client: Client, change: dict[str, object], error: type[WireError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        client.handshake(**change)


def test_a_digest_that_differs_shows_both(client: Client) -> None:
    ours = client.handshake().config_digest
    with pytest.raises(WrongState, match=f"0123.*{ours}"):
        client.handshake(config_digest="0123")


def test_values_come_back_in_the_order_of_the_rows(client: Client, step: int) -> None:
    events = list(client.compute_values(experience(step), base_step=step - 1))
    assert [event.WhichOneof("event") for event in events] == ["progress", "result"]
    assert events[-1].result.engine_time.started_unix_ns > 0
    values = client.get(experience(step), "values")["values"]
    assert values.values.tolist() == toy.values_of(PROMPTS, RESPONSES).values.tolist()
    assert values.lengths.tolist() == [1, 2, 3, 2]


def test_an_update_commits_once_however_often_it_is_sent(client: Client, step: int) -> None:
    first = result(client.update(step, request_id=f"update-{step}"))
    weights = client.digest(step)
    again = result(client.update(step, request_id=f"update-{step}"))
    assert (first.committed_step, first.replayed) == (step, False)
    assert (again.committed_step, again.replayed, again.engine_time) == (step, True, first.engine_time)
    assert client.digest(step) == weights
    with pytest.raises(NotFound):
        client.get(experience(step), "prompts")


def test_a_lost_reply_of_a_computation_is_given_again(client: Client, step: int) -> None:
    first = result(client.compute_values(experience(step), base_step=step - 1, request_id="values"))
    again = result(client.compute_values(experience(step), base_step=step - 1, request_id="values"))
    assert again.engine_time == first.engine_time


def test_a_lost_reply_of_a_checkpoint_is_given_again_also_after_the_next_update(client: Client, step: int) -> None:
    first = result(client.save(step - 1, request_id=f"save-{step}"))
    result(client.update(step))
    again = result(client.save(step - 1, request_id=f"save-{step}"))
    assert again == first
    assert isinstance(error_of(client.save(step - 1, request_id=f"another-save-{step}")), WrongStep)


def test_wrong_steps_are_refused_and_change_nothing(client: Client, step: int) -> None:
    assert isinstance(error_of(client.update(step + 1, base_step=step - 1)), WrongStep)
    assert isinstance(error_of(client.update(step, base_step=step)), WrongStep)
    refusal = error_of(client.compute_values(experience(step), base_step=step))
    assert isinstance(refusal, WrongStep)
    assert str(refusal).startswith(f"critic, step {step}, ComputeValues: ")
    assert client.status().committed_step == step - 1


def test_status_and_health_answer_while_the_engine_is_busy(client: Client, blocked: tuple[object, str]) -> None:
    status = client.status()
    assert status.state == worker_pb2.WORKER_STATE_BUSY
    assert status.running_method == "ComputeValues"
    assert status.progress.phase == "blocked"
    health = health_pb2_grpc.HealthStub(client.channel)
    for service in ("", "splitppo.v1.WorkerService", "splitppo.v1.CriticService"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_health_can_be_watched(client: Client) -> None:
    watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest(service=""), timeout=10)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


def test_batches_move_while_the_engine_is_busy(client: Client, step: int, blocked: tuple[object, str]) -> None:
    client.put(experience(step + 1), prompts=PROMPTS)
    assert client.get(experience(step + 1), "prompts")["prompts"].num_rows == 4


def test_the_same_request_joins_the_running_command(
    service: Toy, client: Client, step: int, blocked: tuple[object, str]
) -> None:
    stream, request_id = blocked
    joined = client.compute_values(experience(step), base_step=step - 1, request_id=request_id)
    assert progress(joined).phase == "blocked"
    (service.run_dir / "go").touch()
    assert result(joined) == result(stream)


def test_a_full_queue_refuses(service: Toy, client: Client, step: int, blocked: tuple[object, str]) -> None:
    waiting = [client.compute_values(experience(step), base_step=step - 1) for _ in range(2)]
    wait_until(lambda: client.status().queued_commands == 2, what="two commands queued")
    refusal = error_of(client.compute_values(experience(step), base_step=step - 1))
    assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_queued_commands" in str(refusal)
    (service.run_dir / "go").touch()
    assert [result(stream).committed_step for stream in waiting] == [step - 1, step - 1]


def test_an_update_commits_although_its_caller_has_gone(service: Toy, client: Client, step: int) -> None:
    (service.run_dir / "go").unlink(missing_ok=True)
    client.put(experience(step), prompts=prompts_that(toy.BLOCK))
    stream = client.update(step, request_id=f"update-{step}")
    assert progress(stream).phase == "blocked"
    stream.cancel()
    (service.run_dir / "go").touch()
    wait_until(lambda: client.status().committed_step == step, what="committed")
    assert result(client.update(step, request_id=f"update-{step}")).replayed


def test_what_the_role_refuses_is_an_invalid_argument(client: Client, step: int) -> None:
    client.put(experience(step), prompts=prompts_that(toy.REFUSED))
    refusal = error_of(client.update(step))
    assert isinstance(refusal, InvalidArgument)
    assert "the one that is refused" in str(refusal)
    assert client.status().committed_step == step - 1


def test_out_of_memory_before_the_first_optimizer_step_is_survived(client: Client, step: int) -> None:
    client.put(experience(step), prompts=prompts_that(toy.OUT_OF_MEMORY))
    assert isinstance(error_of(client.update(step)), OutOfMemory)
    client.put(experience(step), prompts=PROMPTS)
    assert result(client.update(step)).committed_step == step


def test_an_update_that_failed_half_way_leaves_only_the_way_back(client: Client, step: int) -> None:
    result(client.save(step - 1))
    weights = client.digest(step - 1)
    client.put(experience(step), prompts=prompts_that(toy.FAIL_AFTER_STEP))
    assert error_of(client.update(step)).code == grpc.StatusCode.INTERNAL
    assert client.status().state == worker_pb2.WORKER_STATE_DIRTY
    health = health_pb2_grpc.HealthStub(client.channel)
    check = health_pb2.HealthCheckRequest(service="splitppo.v1.CriticService")
    wait_until(
        lambda: health.Check(check, timeout=10).status == health_pb2.HealthCheckResponse.NOT_SERVING, what="not serving"
    )
    refusal = error_of(client.compute_values(experience(step), base_step=step - 1))
    assert refusal.code == grpc.StatusCode.FAILED_PRECONDITION
    assert refusal.reason == "DIRTY"
    with pytest.raises(WrongState, match="LoadCheckpoint"):
        client.put(experience(step), prompts=PROMPTS)
    assert result(client.load(step - 1, base_step=step - 1)).committed_step == step - 1
    assert client.digest(step - 1) == weights
    wait_until(lambda: health.Check(check, timeout=10).status == health_pb2.HealthCheckResponse.SERVING, what="serving")


def test_a_save_answers_when_it_is_durable_and_commands_go_on_meanwhile(
    service: Toy, client: Client, step: int
) -> None:
    result(client.update(step))
    (service.run_dir / "hold_save").touch()
    saving = client.save(step)
    assert client.digest(step)
    directory = service.run_dir / "checkpoints" / f"global_step_{step}" / "critic"
    assert not (directory / "weights").exists()
    (service.run_dir / "release_save").touch()
    assert result(saving).committed_step == step
    assert (directory / "weights").exists()
    (service.run_dir / "hold_save").unlink()


def test_step_0_is_the_initial_model(client: Client, step: int) -> None:
    result(client.load(0, base_step=step - 1))
    initial = client.digest(0)
    client.put(experience(1), prompts=PROMPTS, responses=RESPONSES, returns=RETURNS)
    result(client.update(1))
    assert client.digest(1) != initial
    result(client.load(0, base_step=1))
    assert client.digest(0) == initial
    assert client.status().slots == []


@pytest.mark.parametrize("reflection", REFLECTION)
def test_reflection_lists_the_services(client: Client, reflection: str) -> None:
    own = {f"splitppo.v1.{name}" for name in ("WorkerService", "CriticService", "ActorService")}  # of toy.py's commands
    assert list_services(client.channel, reflection) == {*own, "grpc.health.v1.Health", *REFLECTION}


def test_bytes_that_are_no_message_are_an_invalid_argument(client: Client, step: int) -> None:
    before = client.status()
    for method in ("splitppo.v1.CriticService/Update", "splitppo.v1.WorkerService/LoadCheckpoint"):
        with pytest.raises(grpc.RpcError) as failed:
            list(client.channel.unary_stream(f"/{method}")(b"\xff\xff\xff", timeout=10))
        assert isinstance(error_from_rpc(failed.value), InvalidArgument)
    with pytest.raises(grpc.RpcError) as failed:
        client.channel.stream_unary("/splitppo.v1.WorkerService/PutBatch")(iter([b"\xff"]), timeout=10)
    assert isinstance(error_from_rpc(failed.value), InvalidArgument)
    assert client.status() == before


def test_malformed_commands_are_refused(client: Client, step: int) -> None:
    no_slot = client.compute_values(batch_pb2.Slot(), base_step=step - 1)
    assert "slot must be given" in str(error_of(no_slot))
    long_id = client.compute_values(experience(step), base_step=step - 1, request_id="x" * 300)
    assert "request_id" in str(error_of(long_id))
    wrong_kind = client.critic.Update(
        worker_request(client, batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=step), step - 1), timeout=10
    )
    assert isinstance(error_of(wrong_kind), InvalidArgument)


def worker_request(client: Client, slot: batch_pb2.Slot, base_step: int) -> object:
    return critic_pb2.CriticUpdateRequest(header=client.header(base_step), slot=slot)


def test_a_batch_that_breaks_the_schema_changes_nothing(client: Client, step: int) -> None:
    before = client.status()
    with pytest.raises(InvalidArgument, match="rows"):
        client.put(experience(step), prompts=[[1]])
    with pytest.raises(LimitExceeded, match="max_batch_bytes"):
        client.put(experience(step + 1), prompts=[[1] * (1 << 19)])
    with pytest.raises(CorruptBatch):
        put_corrupted(client, experience(step + 1))
    with pytest.raises(WrongState, match="steps"):
        client.put(experience(step + 5), prompts=PROMPTS)
    assert client.status() == before
    assert client.get(experience(step), "prompts")["prompts"].num_rows == 4


def put_corrupted(client: Client, slot: batch_pb2.Slot) -> None:
    header = batch_pb2.BatchHeader(slot=slot, num_rows=1, total_bytes=4)
    header.columns.add(name="prompts", dtype=batch_pb2.DTYPE_INT32, lengths=[1])
    opening = worker_pb2.PutBatchHeader(run_id=client.run_id, epoch=client.epoch, batch=header)
    chunk = batch_pb2.BatchChunk(offset=0, payload=b"abcd", checksum=1)
    parts = [worker_pb2.PutBatchRequest(header=opening), worker_pb2.PutBatchRequest(chunk=chunk)]
    try:
        client.worker.PutBatch(iter(parts), timeout=10)
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


def test_columns_that_are_not_there_are_named(client: Client, step: int) -> None:
    with pytest.raises(WrongState, match="no column 'values'; it has prompts, responses, returns"):
        client.get(experience(step), "values")
    with pytest.raises(InvalidArgument, match="at least one column"):
        client.get(experience(step))


def test_an_older_controller_is_refused_everywhere_once_a_newer_one_has_come(service: Toy, client: Client) -> None:
    """Last: from here on the module's client is the old controller."""
    step = client.status().committed_step + 1
    newer = service.another_client(epoch=2)
    newer.handshake()
    with pytest.raises(StaleEpoch):
        client.handshake()
    with pytest.raises(StaleEpoch):
        client.put(experience(step), prompts=PROMPTS)
    with pytest.raises(StaleEpoch):
        client.get(experience(step), "prompts")
    assert isinstance(error_of(client.update(step)), StaleEpoch)
    assert newer.put(experience(step + 1), prompts=PROMPTS) > 0
    newer.close()
