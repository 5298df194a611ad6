"""Turns and replies travel between ranks while a command runs, and nothing is left behind when it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from services.runtime.ranks.control_channel import ControlChannel
from services.runtime.ranks.exchange import receiving_replies, sending_replies
from services.runtime.ranks.parts import PartGatherer, sending
from services.runtime.role import CommandProgress, ReplyLimits, ReplyQueue
from services.rollout.reply_router import OpenConversations
from splitppo import failpoints
from splitppo.batch import Batch
from splitppo.config.sections.debug import DebugConfig
from splitppo.failpoints import FailpointError
from splitppo.v1 import conversation_pb2
from tests.support.ranks import rank_processes
from tests.support.turns import ended_turn, turn_reply

NUM_RANKS, NUM_TURNS = 3, 40


def _raise(error: Exception) -> None:
    raise error


def _lead(channel: ControlChannel, *, answers: bool) -> list[tuple[int, int]]:
    """Rank 0, which answers every turn with a reply that names it, or none."""
    announced: list[tuple[int, int]] = []

    def announce(ended: conversation_pb2.TurnsEnded) -> None:
        turns = [(turn.place, turn.turn) for turn in ended.turns]
        announced.extend(turns)
        replies = [conversation_pb2.TurnReply(place=p, turn=turn, tokens=[p, turn] * 50) for p, turn in turns]
        for _ in range(2 if answers else 0):  # the second time they are ignored
            talks.reply(replies)

    talks = OpenConversations(ReplyLimits(1 << 20, 1 << 30), [[rank] for rank in range(NUM_RANKS)], announce)
    gatherer = PartGatherer(2, NUM_RANKS, lambda ready, rows: None)
    with gatherer.receiving(channel, _raise, talks), sending_replies(channel, talks, _raise):
        for part in (1, 2):
            gatherer.add(0, part, Batch.from_rows(places=[]), 0)
        for rank in range(1, NUM_RANKS):  # for a rank that may have ended by now: it drops them
            talks.replies[rank].put([conversation_pb2.TurnReply(place=rank, turn=0)])
    assert gatherer.missing == []
    return announced


def _follow(channel: ControlChannel, *, answers: bool) -> list[conversation_pb2.TurnReply]:
    """Another rank, with one response: its turns, a part in the midst of them, and the replies."""
    rank, taken = dist.get_rank(), list[conversation_pb2.TurnReply]()
    with receiving_replies(channel, _raise) as replies, sending(channel, 2, takes_replies=True) as sender:
        progress = CommandProgress("test", (), sender.send_part, lambda: False, sender.send_turns, replies)
        for turn in range(1, NUM_TURNS + 1) if answers else (1,):
            progress.turns_ended([ended_turn(rank, turn, [1])])
            while answers and not any(reply.turn == turn for reply in taken):
                taken += progress.take_replies(5.0)
            if turn in (1, 2):
                progress.part_ready(turn, Batch.from_rows(places=[[rank]]), policy_version=0)
        if not answers:
            progress.part_ready(2, Batch.from_rows(places=[]), policy_version=0)
    return [reply for reply in taken if reply.turn]


def _converse() -> list[Any]:
    """Several commands, one after the other, on the same channel."""
    channel = ControlChannel(NUM_RANKS, dist.new_group(backend="gloo"))
    act: Any = _lead if dist.get_rank() == 0 else _follow
    return [act(channel, answers=answers) for answers in (True, False, True)]


@pytest.fixture(scope="module")
def ranks() -> Any:
    with rank_processes(NUM_RANKS) as run:
        yield run


def test_every_turn_is_announced_and_answered_and_the_next_command_finds_nothing_of_it(ranks: Any) -> None:
    told, *others = ranks(NUM_RANKS, _converse)
    turns = [(rank, turn) for rank in (1, 2) for turn in range(1, NUM_TURNS + 1)]
    assert [sorted(announced) for announced in told] == [turns, [(1, 1), (2, 1)], turns]
    for rank, taken in enumerate(others, start=1):
        replies = [turn_reply(rank, turn, (rank, turn) * 50) for turn in range(1, NUM_TURNS + 1)]
        assert taken == [replies, [], replies]


@pytest.fixture
def armed(tmp_path: Path) -> Iterator[None]:
    """Failpoints at the second turn and at the second reply."""
    point = {"action": "raise", "hit": 2}
    debug = DebugConfig.model_validate({"failpoints": {f"actor.generate.{name}": point for name in ("turn", "reply")}})
    failpoints.arm(debug, tmp_path, "actor")
    yield
    failpoints.arm(DebugConfig(), tmp_path, "actor")


@pytest.mark.usefixtures("armed")
def test_each_turn_and_each_reply_passes_a_failpoint() -> None:
    announced, replies = list[conversation_pb2.TurnsEnded](), ReplyQueue()
    progress = CommandProgress("generate", (), lambda *_: None, lambda: False, announced.append, replies)
    progress.turns_ended([ended_turn(0, 1, [1])])
    with pytest.raises(FailpointError, match=r"generate\.turn"):
        progress.turns_ended([ended_turn(1, 1, [1])])
    assert len(announced) == 2
    replies.put([conversation_pb2.TurnReply(place=0, turn=1, tokens=[3])])
    assert progress.take_replies(0.0) == [turn_reply(0, 1, (3,))]
    replies.put([conversation_pb2.TurnReply(place=1, turn=1, is_last=True)])
    with pytest.raises(FailpointError, match=r"generate\.reply"):
        progress.take_replies(0.0)


def _lose_a_rank() -> bool:
    """Rank 1 leaves without an end mark; the others notice."""
    channel, lost = ControlChannel(2, dist.new_group(backend="gloo")), threading.Event()
    if dist.get_rank() == 0:
        talks = OpenConversations(ReplyLimits(100, 100), [[0], [1]], lambda ended: None)
        with PartGatherer(0, 2, lambda ready, rows: None).receiving(channel, lambda error: lost.set(), talks):
            assert lost.wait(60)
    return lost.is_set()


def test_a_rank_that_is_lost_is_noticed_where_its_turns_are_awaited(ranks: Any) -> None:
    assert ranks(2, _lose_a_rank)[0]
