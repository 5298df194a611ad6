"""Commands that exchange messages with their callers, in a group of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from services.runtime.command import CommandCancelled
from services.runtime.state.command_call import CommandCall
from splitppo.batch import Batch
from splitppo.rpc.errors import Internal, Unavailable, WireError
from splitppo.v1 import batch_pb2, worker_pb2
from tests.support.command_calls import result_of
from tests.unit.runtime.ranks.service import ROWS, Service, experience

EVALUATION = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=0)


class Numbers:
    """A router of numbers: one of a rank is announced as that of a part, a caller sends them by rank."""

    def from_rank(self, rank: int, message: bytes) -> worker_pb2.CommandEvent:
        return worker_pb2.CommandEvent(part=worker_pb2.PartReady(part=int(message)))

    def from_caller(self, request: Mapping[int, int]) -> Mapping[int, bytes]:
        return {rank: str(number).encode() for rank, number in request.items()}


def numbers_of(call: CommandCall) -> list[int]:
    """The numbers that were announced so far, in their order."""
    events = [event for event in call.read(0)[0] if not isinstance(event, WireError)]
    return [event.part.part for event in events if event.HasField("part")]


def talking(service: Service, work: Callable[[CommandCall, Any], None]) -> CommandCall:
    """Runs a command that exchanges messages, and does this work."""
    service.worker.slots.put(EVALUATION, ROWS, 0)
    service.role.router = Numbers()
    call = service.submit("ComputeValues", slot=EVALUATION)
    service.role.working = lambda batch, report: work(call, report)
    service.work()
    return call


def test_messages_of_a_command_become_events_and_those_of_callers_reach_it(service: Service) -> None:
    received: list[list[bytes]] = []

    def work(call: CommandCall, report: Any) -> None:
        report.send(b"7")
        assert call.messages is not None
        call.messages.from_caller({0: 3})
        call.messages.from_caller({})
        call.messages.from_caller({0: 4})
        received.append(report.receive(0.0))
        report.send(b"8")
        received.append(report.receive(0.0))

    call = talking(service, work)
    assert result_of(call).policy_version == 5
    assert received == [[b"3", b"4"], []]
    assert numbers_of(call) == [7, 8]


def test_a_cancelled_command_that_waits_for_messages_leaves_a_service_that_goes_on(service: Service) -> None:
    def work(call: CommandCall, report: Any) -> None:
        report.send(b"7")
        call.cancel("other weights are being loaded")
        assert not report.receive(0.01)
        assert report.is_cancelled()
        raise CommandCancelled

    call = talking(service, work)
    with pytest.raises(Unavailable, match="cancelled: other weights"):
        result_of(call)
    service.role.router = None
    service.role.working = lambda batch, report: None
    service.worker.slots.put(experience(1), ROWS, 0)
    assert service.do("ComputeValues", slot=experience(1)).committed_step == 0


@pytest.mark.parametrize("use", [lambda report: report.send(b"1"), lambda report: report.receive(0.0)])
def test_a_command_that_exchanges_no_messages_cannot_send_or_receive_any(
    service: Service, use: Callable[[Any], None]
) -> None:
    def work(batch: Batch, report: Any) -> None:
        use(report)

    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.working = work
    with pytest.raises(Internal, match="compute_values exchanges no messages"):
        service.do("ComputeValues", slot=experience(1))
