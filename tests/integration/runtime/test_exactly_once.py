"""Updates that come twice, late or out of order, or from a replaced caller, are applied once or never."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from splitppo.rpc.errors import DeadlineExceeded, StaleEpoch, WrongStep, error_from_rpc
from splitppo.v1 import critic_pb2, worker_pb2
from tests.integration.runtime import toy
from tests.integration.runtime.client import Client, error_of, experience, progress, result
from tests.integration.runtime.conftest import StartToy, Toy
from tests.support.groups import wait_until

RESPONSES = [[1], [2]]
RETURNS = [[0.5], [1.5]]


@pytest.fixture(scope="module")
def service(start_module_toy: StartToy) -> Toy:
    return start_module_toy()


@pytest.fixture
def client(service: Toy) -> Client:
    return service.client


@pytest.fixture
def step(service: Toy, client: Client) -> Iterator[int]:
    """The next step, with its experience; its update is held until the file `go` is there."""
    (service.run_dir / "go").unlink(missing_ok=True)
    step = client.status().committed_step + 1
    put(client, step)
    yield step
    (service.run_dir / "go").touch()
    wait_until(lambda: service.client.status().state == worker_pb2.WORKER_STATE_IDLE, what="idle again")


def put(client: Client, step: int) -> None:
    client.put(experience(step), prompts=[[toy.BLOCK], [1]], responses=RESPONSES, returns=RETURNS)


def go(service: Toy) -> None:
    (service.run_dir / "go").touch()


def num_applied(service: Toy) -> int:
    """Returns the number of updates in the weights; each update adds the sum of its returns."""
    client = service.client
    result(client.save(client.status().committed_step))
    folder = service.run_dir / "checkpoints" / f"global_step_{client.status().committed_step}" / "critic"
    return round(float((folder / "weights").read_text()) / 2.0)


def test_duplicates_that_arrive_while_the_update_runs_and_afterwards_get_the_same_reply(
    service: Toy, client: Client, step: int
) -> None:
    before = num_applied(service)
    request_id = f"update-{step}"
    first = client.update(step, request_id=request_id)
    assert progress(first).phase == "blocked"
    joined = [client.update(step, request_id=request_id) for _ in range(5)]
    assert [progress(stream).phase for stream in joined] == ["blocked"] * 5
    go(service)
    reply = result(first)
    assert [result(stream) for stream in joined] == [reply] * 5
    late = result(client.update(step, request_id=request_id))
    assert (late.replayed, late.engine_time, late.metrics) == (True, reply.engine_time, reply.metrics)
    assert num_applied(service) == before + 1


def test_updates_that_overtake_each_other_are_applied_in_order_or_refused(
    service: Toy, client: Client, step: int
) -> None:
    before = num_applied(service)
    go(service)
    early = error_of(client.update(step + 1, base_step=step, request_id="second"))
    assert isinstance(early, WrongStep)
    result(client.update(step, request_id="first"))
    put(client, step + 1)
    result(client.update(step + 1, request_id="second"))
    delayed = error_of(client.update(step, request_id="first"))
    assert isinstance(delayed, WrongStep)
    assert client.status().committed_step == step + 1
    assert num_applied(service) == before + 2


def test_two_requests_for_one_step_commit_it_once(service: Toy, client: Client, step: int) -> None:
    before = num_applied(service)
    first = client.update(step, request_id="one")
    assert progress(first).phase == "blocked"
    second = client.update(step, request_id="another")
    wait_until(lambda: client.status().queued_commands == 1, what="the second one queued")
    go(service)
    assert result(first).committed_step == step
    assert isinstance(error_of(second), WrongStep)
    assert num_applied(service) == before + 1


def test_a_caller_whose_deadline_passes_in_the_middle_of_an_update_finds_it_applied_once(
    service: Toy, client: Client, step: int
) -> None:
    before = num_applied(service)
    request = critic_pb2.CriticUpdateRequest(header=client.header(step - 1, f"late-{step}"), slot=experience(step))
    with pytest.raises(grpc.RpcError) as failed:
        list(client.critic.Update(request, timeout=1.0))
    assert isinstance(error_from_rpc(failed.value), DeadlineExceeded)
    assert client.status().running_method == "Update", "the update goes on"
    joined = client.critic.Update(request, timeout=60.0)
    assert progress(joined).phase == "blocked"
    go(service)
    assert result(joined).committed_step == step
    assert result(client.critic.Update(request, timeout=60.0)).replayed
    assert num_applied(service) == before + 1


def test_an_old_controller_cannot_repeat_follow_up_or_queue_behind_its_own_update(
    service: Toy, client: Client, step: int
) -> None:
    """Last: from here on the module's client is the old controller."""
    before = num_applied(service)
    running = client.update(step, request_id="of-the-old-one")
    assert progress(running).phase == "blocked"
    queued = client.update(step + 1, request_id="queued")
    newer = service.another_client(epoch=client.epoch + 1)
    newer.handshake()
    assert isinstance(error_of(client.update(step, request_id="of-the-old-one")), StaleEpoch)
    go(service)
    assert error_of(queued).code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION)
    # A mutation that has begun runs to its end; the new controller finds it committed, and goes back if it must.
    wait_until(lambda: newer.status().committed_step == step, what="the old controller's update")
    assert isinstance(error_of(client.update(step + 1)), StaleEpoch)
    service.client = newer
    assert num_applied(service) == before + 1
