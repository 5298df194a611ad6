"""Commands whose conversations take replies, in a group of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.runtime.role import CommandCancelled, ReplyLimits
from services.runtime.state.command_call import CommandCall
from splitppo.batch import Batch
from splitppo.rpc.errors import Internal, Unavailable, WireError
from splitppo.v1 import batch_pb2, conversation_pb2
from tests.support.command_calls import result_of
from tests.support.turns import ended_turn, turn_reply
from tests.unit.runtime.ranks.service import ROWS, Service, experience

EVALUATION = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=0)


def turns_of(call: CommandCall) -> list[list[conversation_pb2.Turn]]:
    """The events with turns so far, in their order."""
    events = [event for event in call.read(0)[0] if not isinstance(event, WireError)]
    return [list(event.turns.turns) for event in events if event.HasField("turns")]


def talking(service: Service, work: Callable[[CommandCall, Any], None], num_parts: int = 0) -> CommandCall:
    """Runs a command that takes replies, and does this work."""
    service.worker.slots.put(EVALUATION, ROWS, 0)
    service.role.reply_limits, service.role.num_parts = ReplyLimits(100, 50), num_parts
    call = service.submit("ComputeValues", slot=EVALUATION)
    service.role.working = lambda batch, report: work(call, report)
    service.work()
    return call


def test_turns_become_events_and_replies_reach_the_command(service: Service) -> None:
    taken: list[list[conversation_pb2.TurnReply]] = []

    def work(call: CommandCall, report: Any) -> None:
        report.turns_ended([ended_turn(0, 1, [7, 8]), ended_turn(1, 1, [9])])
        report.turns_ended([])
        assert call.conversations is not None
        call.conversations.reply([conversation_pb2.TurnReply(place=1, turn=1, tokens=[3, 4])])
        call.conversations.reply([conversation_pb2.TurnReply(place=0, turn=1, is_last=True)])
        taken.append(list(report.take_replies(0.0)))
        report.turns_ended([ended_turn(1, 2, [5], is_last=True)])
        taken.append(list(report.take_replies(0.0)))

    call = talking(service, work)
    assert result_of(call).policy_version == 5
    assert taken == [[turn_reply(1, 1, (3, 4)), turn_reply(0, 1, (), is_last=True)], []]
    assert turns_of(call) == [
        [conversation_pb2.Turn(place=0, turn=1, tokens=[7, 8]), conversation_pb2.Turn(place=1, turn=1, tokens=[9])],
        [conversation_pb2.Turn(place=1, turn=2, tokens=[5], is_last=True)],
    ]


@pytest.mark.parametrize("num_parts", [0, 1])
def test_a_command_that_takes_replies_may_be_unstreamed_and_work_on_any_slot(service: Service, num_parts: int) -> None:
    assert result_of(talking(service, lambda call, report: None, num_parts)).committed_step == 0
    assert service.worker.slots.slots() == [EVALUATION]


def test_a_cancelled_command_that_waits_for_replies_leaves_a_service_that_goes_on(service: Service) -> None:
    def work(call: CommandCall, report: Any) -> None:
        report.turns_ended([ended_turn(0, 1, [7])])
        call.cancel("other weights are being loaded")
        assert not report.take_replies(0.01)
        assert report.is_cancelled()
        raise CommandCancelled

    call = talking(service, work)
    with pytest.raises(Unavailable, match="cancelled: other weights"):
        result_of(call)
    service.role.reply_limits, service.role.working = None, lambda batch, report: None
    service.worker.slots.put(experience(1), ROWS, 0)
    assert service.do("ComputeValues", slot=experience(1)).committed_step == 0


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda report: report.turns_ended([ended_turn(0, 1, [1])]), "turns were reported, but"),
        (lambda report: report.take_replies(0.0), "replies were asked for, but"),
    ],
)
def test_a_command_that_takes_no_replies_has_no_turns(
    service: Service, use: Callable[[Any], None], message: str
) -> None:
    def work(batch: Batch, report: Any) -> None:
        use(report)

    service.worker.slots.put(experience(1), ROWS, 0)
    service.role.working = work
    with pytest.raises(Internal, match=message):
        service.do("ComputeValues", slot=experience(1))


def test_many_long_turns_at_once_are_several_events_that_fit_into_a_message(service: Service) -> None:
    service.role.reply_limits = ReplyLimits(1 << 20, 1 << 20)
    rows = Batch.from_rows(prompts=[[1]] * 10, responses=[[4]] * 10)
    service.worker.slots.put(EVALUATION, rows, 0)
    tokens = [1 << 19] * 100_000  # 3 bytes each
    service.role.working = lambda batch, report: report.turns_ended([ended_turn(p, 1, tokens) for p in range(10)])
    call = service.submit("ComputeValues", slot=EVALUATION)
    service.work()
    assert [len(event) for event in turns_of(call)] == [3, 3, 3, 1]
