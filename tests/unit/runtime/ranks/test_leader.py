"""The loop of rank 0 in a group of one rank: accepted controllers, stored results, state after a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.runtime.ranks.control_channel import LEAVE, NOTHING, ControlChannel, Order
from services.runtime.state.command_call import CommandCall
from services.runtime.state.command_queue import CommandQueue, draining
from splitppo.batch import Batch
from splitppo.rpc.errors import (
    Dirty,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfMemory,
    PeerDied,
    Place,
    StaleEpoch,
    WrongState,
    WrongStep,
)
from splitppo.v1 import worker_pb2
from tests.support.command_calls import result_of
from tests.unit.runtime.ranks.service import (
    ROWS,
    GroupEnded,
    RecordedFailureWatch,
    Service,
    experience,
    new_leader,
    raises,
)


def test_columns_go_into_the_slot_and_progress_to_the_caller(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.metrics = {"mean": torch.tensor(2.5)}
    call = service.submit("ComputeValues", slot=experience(1))
    service.work()
    assert call.progress == worker_pb2.Progress(done=1, total=1, phase="values")
    assert dict(result_of(call).metrics) == {"mean": 2.5}
    assert result_of(call).engine_time.finished_unix_ns >= result_of(call).engine_time.started_unix_ns > 0
    assert service.worker.slots.get(experience(1))["values"].values.tolist() == [4.0, 5.0, 6.0]


@pytest.mark.parametrize("base_step", [0, 6, 100])
def test_where_nothing_is_trained_a_request_may_mean_any_step(tmp_path: Path, base_step: int) -> None:
    service = Service(tmp_path, trains=False)
    service.worker.slots.put(experience(7), ROWS, service.worker.committed_step)
    reply = service.do("ComputeValues", base_step=base_step, slot=experience(7))
    assert reply.committed_step == 0
    assert "values" in service.worker.slots.get(experience(7))
    with pytest.raises(StaleEpoch):
        service.do("ComputeValues", base_step=base_step, slot=experience(7), epoch=0, request_id="older")


@pytest.mark.parametrize("method", ["SaveCheckpoint", "LoadCheckpoint", "ComputeWeightsDigest"])
def test_where_nothing_is_trained_there_is_nothing_to_save(tmp_path: Path, method: str) -> None:
    service = Service(tmp_path, trains=False)
    with pytest.raises(InvalidArgument, match="the critic group trains nothing: it has no checkpoints and no digest"):
        service.do(method)
    assert list(tmp_path.iterdir()) == []


def test_an_update_commits_its_step_and_drops_its_experience(service: Service) -> None:
    assert service.update(1).committed_step == 1
    assert service.worker.ledger.committed_step == 1
    assert service.worker.slots.slots() == []
    assert service.do("ComputeWeightsDigest", base_step=1).weights_sha256 == "1"


def test_the_columns_of_an_update_are_in_its_slot_until_the_next_commit_and_nobody_puts_there(service: Service) -> None:
    slot = experience(1)
    service.role.update_columns = Batch.from_rows(update_entropy=[[0.5], []])
    service.update(1)
    assert service.worker.slots.slots() == [slot]
    assert service.worker.slots.get(slot)["update_entropy"].values.tolist() == [0.5]
    with pytest.raises(WrongState, match="no room for experience slot of step 1"):
        service.worker.slots.put(slot, ROWS, 1)
    service.role.update_columns = None
    service.update(2)
    assert service.worker.slots.slots() == []
    with pytest.raises(NotFound, match="experience slot of step 1"):
        service.worker.slots.get(slot)


def test_an_applied_update_is_answered_from_the_ledger_and_not_applied_again(service: Service) -> None:
    first = service.update(1)
    again = service.do("Update", base_step=0, slot=experience(1))
    assert again.replayed
    assert again.engine_time == first.engine_time
    assert float(service.role.weights.detach()) == 1.0


def test_steps_are_checked_when_a_command_leaves_the_queue_not_on_arrival(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.worker.slots.put(experience(2), ROWS, 0)
    update = service.submit("Update", base_step=0, slot=experience(1))
    ahead = service.submit("ComputeValues", base_step=1, slot=experience(2))
    late = service.submit("ComputeValues", base_step=0, slot=experience(2), request_id="late")
    service.work()
    assert result_of(update).committed_step == 1
    assert result_of(ahead).committed_step == 1
    with pytest.raises(WrongStep, match="expects committed step 0, it is 1"):
        result_of(late)


@pytest.mark.parametrize("step", [2, 3])
def test_an_update_must_be_of_the_next_step(service: Service, step: int) -> None:
    with pytest.raises(WrongStep, match="step 1 comes next"):
        service.do("Update", base_step=0, slot=experience(step))


def test_a_controller_that_was_replaced_while_its_command_waited_is_refused(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    call = service.submit("Update", slot=experience(1))
    service.worker.fencing.take("run", 2)
    service.work()
    with pytest.raises(StaleEpoch):
        result_of(call)
    assert service.worker.ledger.committed_step == 0


def test_a_missing_slot_and_missing_columns_are_refused(service: Service) -> None:
    with pytest.raises(NotFound, match="experience slot of step 1"):
        service.do("ComputeValues", slot=experience(1))
    service.worker.slots.put(experience(1), ROWS.select(["prompts"]), 0)
    with pytest.raises(WrongState, match="lacks responses; it has prompts"):
        service.do("ComputeValues", slot=experience(1))
    service.worker.slots.put(experience(2), Batch.from_rows(prompts=[], responses=[]), 0)
    with pytest.raises(InvalidArgument, match="no rows"):
        service.do("ComputeValues", slot=experience(2))


def test_what_prepare_refuses_is_the_callers_mistake(service: Service) -> None:
    service.worker.slots.put(experience(1), Batch.from_rows(prompts=[[101]], responses=[[1]]), 0)
    with pytest.raises(InvalidArgument, match="over 100"):
        service.do("ComputeValues", slot=experience(1))
    assert service.worker.is_serving


def test_an_error_of_the_engine_is_our_bug_and_the_group_of_one_goes_on(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.before_step = lambda: raises(error=ValueError("shapes differ"))
    with pytest.raises(Internal, match="ValueError: shapes differ"):
        service.do("ComputeValues", slot=experience(1))
    service.role.before_step = lambda: None
    assert service.do("ComputeValues", slot=experience(1)).committed_step == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("1 TiB"), MemoryError("1 TiB")])
@pytest.mark.parametrize("method", ["ComputeValues", "Update"])
def test_out_of_memory_before_the_first_optimizer_step_leaves_the_service_clean(
    service: Service, error: Exception, method: str
) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.before_step = lambda: raises(error=error)
    with pytest.raises(OutOfMemory, match="1 TiB"):
        service.do(method, slot=experience(1))
    service.role.before_step = lambda: None
    assert service.update(1).committed_step == 1


def test_a_bug_before_the_first_optimizer_step_leaves_the_service_clean(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.before_step = lambda: raises(error=RuntimeError("broken"))
    with pytest.raises(Internal, match="broken"):
        service.do("Update", slot=experience(1))
    service.role.before_step = lambda: None
    assert service.update(1).committed_step == 1
    assert float(service.role.weights.detach()) == 1.0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("1 TiB"), RuntimeError("broken")])
def test_an_update_that_failed_after_an_optimizer_step_leaves_it_dirty(service: Service, error: Exception) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.after_step = lambda: raises(error=error)
    with pytest.raises(Internal):
        service.do("Update", slot=experience(1))
    assert service.worker.state == worker_pb2.WORKER_STATE_DIRTY
    with pytest.raises(Dirty, match=r"Update failed half-way.*only GetStatus and LoadCheckpoint"):
        service.do("ComputeValues", slot=experience(1))
    service.do("LoadCheckpoint", step=0)
    assert service.worker.is_serving
    assert service.worker.slots.slots() == []


def test_metrics_that_are_no_numbers_make_an_update_fail(service: Service) -> None:
    service.role.metrics = {"loss": "high"}
    with pytest.raises(Internal):
        service.update(1)
    assert service.worker.state == worker_pb2.WORKER_STATE_DIRTY


def test_an_update_that_cannot_be_entered_into_the_ledger_leaves_it_dirty(service: Service) -> None:
    service.role.metrics = {"a name that no message can hold: \ud800": 1.0}
    with pytest.raises(Internal):
        service.update(1)
    assert service.worker.state == worker_pb2.WORKER_STATE_DIRTY
    with pytest.raises(Dirty):
        service.update(1)
    assert float(service.role.weights.detach()) == 1.0


def test_a_group_of_one_ends_with_its_device(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    broken = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    service.role.before_step = lambda: raises(error=broken)
    with pytest.raises(GroupEnded):
        service.do("ComputeValues", slot=experience(1))
    assert service.failure.endings == [(broken, Place(method="ComputeValues", step=1))]


def test_a_group_of_one_ends_when_a_load_fails_by_itself(service: Service) -> None:
    service.role.before_load = lambda: raises(error=RuntimeError("no room for the weights"))
    with pytest.raises(GroupEnded):
        service.do("LoadCheckpoint", step=0)


class RecordedChannel(ControlChannel):
    """A control channel of rank 0 of two that records its orders and sends none."""

    def __init__(self) -> None:
        super().__init__(2)
        self.announced: list[int] = []

    def announce(self, order: Order) -> None:
        self.announced.append(order.command)


class QuietFailureWatch:
    """Knows that the group leaves in good order."""

    has_stopped = False

    def stop(self) -> None:
        self.has_stopped = True


class DrainedAfterThreeTakes(CommandQueue):
    """Nobody calls; the third time that it is asked, the service drains."""

    num_takes = 0

    def take(self, timeout_s: float) -> CommandCall | None:
        self.num_takes += 1
        if self.num_takes == 3:
            self.close(draining())
        return super().take(timeout_s)


def test_an_idle_leader_gives_signs_of_life_and_says_when_to_leave(service: Service) -> None:
    channel, failure = RecordedChannel(), QuietFailureWatch()
    service.worker.command_queue = DrainedAfterThreeTakes(1)
    watch: Any = failure
    new_leader(service.worker, channel, watch).serve()
    assert channel.announced == [NOTHING, NOTHING, LEAVE]
    assert failure.has_stopped


def test_a_leader_whose_group_has_failed_sends_nobody_away_in_good_order(service: Service) -> None:
    """Else the ranks of another host, and whoever started them there, take it for a drained group's end."""
    channel, failure = RecordedChannel(), RecordedFailureWatch()
    service.worker.mark_failed(PeerDied("rank 1 has died", Place()))
    watch: Any = failure
    with pytest.raises(GroupEnded):
        new_leader(service.worker, channel, watch).serve()
    assert channel.announced == []
    assert failure.endings == [(None, Place())]
