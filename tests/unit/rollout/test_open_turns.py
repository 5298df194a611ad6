"""Turns and replies as the messages of a running Generate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from services.rollout.open_turns import receive_replies, send_turns
from services.runtime.command import CommandProgress, Inbox
from splitppo import failpoints
from splitppo.config.sections.debug import DebugConfig
from splitppo.failpoints import FailpointError
from splitppo.v1.conversation_pb2 import ReplyRequest, TurnReply, TurnsEnded
from tests.support.turns import ended_turn, turn_reply


def progress(sent: list[bytes], inbox: Inbox) -> CommandProgress:
    return CommandProgress("generate", (), lambda *_: None, lambda: False, sent.append, inbox)


@pytest.fixture
def armed(tmp_path: Path) -> Iterator[None]:
    """Failpoints at the second turn and at the second reply."""
    point = {"action": "raise", "hit": 2}
    debug = DebugConfig.model_validate({"failpoints": {f"actor.generate.{name}": point for name in ("turn", "reply")}})
    failpoints.arm(debug, tmp_path, "actor")
    yield
    failpoints.arm(DebugConfig(), tmp_path, "actor")


def message(*replies: TurnReply) -> bytes:
    return ReplyRequest(replies=replies).SerializeToString()


@pytest.mark.usefixtures("armed")
def test_each_turn_and_each_reply_passes_a_failpoint() -> None:
    sent: list[bytes] = []
    inbox: Inbox = SimpleQueue()
    report = progress(sent, inbox)
    send_turns(report, [ended_turn(0, 1, [1])])
    with pytest.raises(FailpointError, match=r"generate\.turn"):
        send_turns(report, [ended_turn(1, 1, [1])])
    assert len(sent) == 2
    inbox.put(message(turn_reply(0, 1, (3,))))
    assert receive_replies(report, 0.0) == [turn_reply(0, 1, (3,))]
    inbox.put(message(turn_reply(1, 1, is_last=True)))
    with pytest.raises(FailpointError, match=r"generate\.reply"):
        receive_replies(report, 0.0)


def test_many_long_turns_at_once_are_several_messages_that_fit_into_an_event() -> None:
    sent: list[bytes] = []
    tokens = [1 << 19] * 100_000  # 3 bytes each
    send_turns(progress(sent, SimpleQueue()), [ended_turn(place, 1, tokens) for place in range(10)])
    assert [len(TurnsEnded.FromString(one).turns) for one in sent] == [3, 3, 3, 1]


def test_replies_that_have_arrived_together_are_taken_together_and_the_end_mark_is_none() -> None:
    inbox: Inbox = SimpleQueue()
    for one in (message(turn_reply(0, 1, (3,)), turn_reply(1, 1, (4,))), message(turn_reply(2, 1, (5,))), None):
        inbox.put(one)
    replies = receive_replies(progress([], inbox), 0.0)
    assert [reply.place for reply in replies] == [0, 1, 2]
