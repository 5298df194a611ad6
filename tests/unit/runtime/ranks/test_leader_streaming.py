"""Streamed commands in a group of one rank: their parts, and the state after a cancellation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from services.runtime.command import CommandCancelled
from services.runtime.state.command_call import CommandCall
from splitppo.batch import Batch
from splitppo.rpc.errors import (
    Internal,
    InvalidArgument,
    Unavailable,
    WireError,
)
from splitppo.v1 import batch_pb2, worker_pb2
from tests.support.command_calls import result_of
from tests.unit.runtime.ranks.service import ROWS, Service, experience, raises, replace_dtype


def parts_of(call: CommandCall) -> list[worker_pb2.PartReady]:
    """Returns the parts that were reported so far, in their order."""
    return [event.part for event in call.read(0)[0] if not isinstance(event, WireError) and event.HasField("part")]


def reports_parts(*parts: int) -> Callable[[Batch, Any], None]:
    """Reports these parts, in this order: part 1 is the last row."""

    def work(batch: Batch, report: Any) -> None:
        for part in parts:
            rows = batch.take(np.array([batch.num_rows - part]))
            values = Batch(rows.num_rows, {"values": replace_dtype(rows), "places": rows["places"]})
            report.part_ready(part, values, policy_version=5)

    return work


def gives_up(batch: Batch, report: Any) -> None:
    assert report.is_cancelled()
    raise CommandCancelled


def step_1(kind: batch_pb2.SlotKind = batch_pb2.SLOT_KIND_EXPERIENCE, *, part: int = 0) -> batch_pb2.Slot:
    return batch_pb2.Slot(kind=kind, step=1, part=part)


@pytest.mark.parametrize("kind", [batch_pb2.SLOT_KIND_EXPERIENCE, batch_pb2.SLOT_KIND_SHARE])
def test_parts_can_be_fetched_and_are_announced_in_the_order_in_which_they_end(
    service: Service, kind: batch_pb2.SlotKind
) -> None:
    service.worker.slots.put(step_1(kind), ROWS, 0)
    service.role.num_parts, service.role.working = 2, reports_parts(2, 1)
    call = service.submit("ComputeValues", slot=step_1(kind))
    service.work()
    assert [(part.part, part.num_parts, part.policy_version) for part in parts_of(call)] == [(2, 2, 5), (1, 2, 5)]
    assert result_of(call).policy_version == 5
    assert service.worker.slots.get(step_1(kind, part=1))["values"].values.tolist() == [5.0, 6.0]
    assert service.worker.slots.get(step_1(kind, part=1))["places"].values.tolist() == [1]
    whole = service.worker.slots.get(step_1(kind))
    assert whole["values"].values.tolist() == [4.0, 5.0, 6.0]
    assert "places" not in whole


def test_a_streamed_command_that_leaves_a_part_out_has_a_bug(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.num_parts, service.role.working = 2, reports_parts(2)
    with pytest.raises(Internal, match=r"without its parts \[1\]"):
        service.do("ComputeValues", slot=experience(1))


def test_parts_of_a_command_that_is_not_streamed_are_a_bug(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.working = lambda batch, report: report.part_ready(1, batch, policy_version=0)
    with pytest.raises(Internal, match="not streamed"):
        service.do("ComputeValues", slot=experience(1))


@pytest.mark.parametrize(
    "slot",
    [
        batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=0),
        step_1(batch_pb2.SLOT_KIND_CANDIDATES),
        step_1(batch_pb2.SLOT_KIND_SHARE, part=1),
    ],
)
def test_no_other_slot_is_worked_on_in_parts(service: Service, slot: batch_pb2.Slot) -> None:
    service.worker.slots.put(slot, ROWS, 0)
    service.role.num_parts = 2
    with pytest.raises(InvalidArgument, match="only a whole slot of experience or a share"):
        service.do("ComputeValues", slot=slot)


def test_nothing_is_kept_of_a_cancelled_command_and_the_service_goes_on(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    call = service.submit("ComputeValues", slot=experience(1))

    def work(batch: Batch, report: Any) -> None:
        reports_parts(1)(batch, report)
        call.cancel("other weights are being loaded")
        reports_parts(2)(batch, report)
        gives_up(batch, report)

    service.role.num_parts, service.role.working = 2, work
    service.work()
    with pytest.raises(Unavailable, match="cancelled: other weights are being loaded"):
        result_of(call)
    assert service.worker.slots.slots() == [experience(1)]
    assert "values" not in service.worker.slots.get(experience(1))
    service.role.num_parts, service.role.working = 0, lambda batch, report: None
    assert service.do("ComputeValues", slot=experience(1)).committed_step == 0


def test_a_command_that_is_finished_before_it_notices_is_answered(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    call = service.submit("ComputeValues", slot=experience(1))

    def work(batch: Batch, report: Any) -> None:
        call.cancel("too late")
        reports_parts(1, 2)(batch, report)

    service.role.num_parts, service.role.working = 2, work
    service.work()
    assert result_of(call).committed_step == 0
    assert [part.part for part in parts_of(call)] == [1, 2]
    assert service.worker.slots.get(step_1(part=2)).num_rows == 1


def test_a_command_that_gives_up_without_being_asked_has_a_bug(service: Service) -> None:
    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.working = lambda batch, report: raises(error=CommandCancelled())
    with pytest.raises(Internal, match="gave ComputeValues up, but it was not cancelled"):
        service.do("ComputeValues", slot=experience(1))
