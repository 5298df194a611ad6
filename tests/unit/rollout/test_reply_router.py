"""Turns and replies of the conversations of a running command: what is taken, what is ignored, what is refused."""

from __future__ import annotations

import random
from queue import Empty

import pytest

from services.runtime.role import ReplyLimits
from services.rollout.reply_router import OpenConversations
from splitppo.rpc.errors import InvalidArgument
from splitppo.v1 import conversation_pb2
from tests.fuzz.replies import LIMITS, Talk, impossible
from tests.support.seeds import shifted

LIMITS_OF_10 = ReplyLimits(num_token_ids=100, max_response_length=10)


class Announced(list[tuple[int, int]]):
    """(place, turn) of each turn that callers were told of."""

    def take(self, ended: conversation_pb2.TurnsEnded) -> None:
        self += [(turn.place, turn.turn) for turn in ended.turns]


def conversations(announced: Announced | None = None) -> OpenConversations:
    """Places 0 and 2 are on rank 0, places 1 and 3 on rank 1."""
    return OpenConversations(LIMITS_OF_10, [[0, 2], [1, 3]], (Announced() if announced is None else announced).take)


def end(talks: OpenConversations, place: int, turn: int, *, num_tokens: int = 2, is_last: bool = False) -> None:
    ended = conversation_pb2.Turn(place=place, turn=turn, tokens=[7] * num_tokens, is_last=is_last)
    talks.turns_ended(place % 2, conversation_pb2.TurnsEnded(turns=[ended]))


def reply(
    place: int, turn: int, tokens: list[int] | None = None, *, is_last: bool = False
) -> conversation_pb2.TurnReply:
    tokens = [1] if tokens is None and not is_last else tokens
    return conversation_pb2.TurnReply(place=place, turn=turn, tokens=tokens, is_last=is_last)


def arrived(talks: OpenConversations, rank: int) -> list[conversation_pb2.TurnReply]:
    """What has arrived for a rank since the last call."""
    replies: list[conversation_pb2.TurnReply] = []
    try:
        while True:
            replies += talks.replies[rank].get_nowait() or ()
    except Empty:
        return replies


def test_replies_go_to_the_rank_that_has_the_row_and_turns_to_the_callers() -> None:
    talks = conversations(announced := Announced())
    for place in (2, 1, 3):
        end(talks, place, 1)
    assert announced == [(2, 1), (1, 1), (3, 1)]

    talks.reply([reply(3, 1, [5]), reply(2, 1, [6, 7]), reply(1, 1, is_last=True)])

    assert arrived(talks, 0) == [reply(2, 1, [6, 7])]
    assert arrived(talks, 1) == [reply(3, 1, [5]), reply(1, 1, is_last=True)]


def test_a_reply_to_a_turn_that_has_one_is_ignored_also_if_it_is_another_one() -> None:
    talks = conversations()
    end(talks, 0, 1)
    talks.reply([reply(0, 1, [5])])
    end(talks, 0, 2)
    talks.reply([reply(0, 2, is_last=True)])
    assert len(arrived(talks, 0)) == 2

    talks.reply([reply(0, 1, [5]), reply(0, 2, [8, 9])])

    assert arrived(talks, 0) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (reply(4, 1), "no response 4; there are 4 responses"),
        (reply(-1, 1), "no response -1"),
        (reply(0, 2), "turn 2 of response 0 has not ended: 1 of its turns have"),
        (reply(0, 0), "turn 0 of response 0 has not ended"),
        (reply(3, 1), "turn 1 of response 3 has not ended: 0 of"),
        (reply(2, 1), "turn 1 of response 2 is the last one"),
        (reply(0, 1, []), "must have tokens, or is_last and no tokens"),
        (reply(0, 1, [1], is_last=True), "must have tokens, or is_last and no tokens"),
        (reply(0, 1, [1, 100]), "a token id outside of 0 to 99"),
        (reply(0, 1, [-1]), "a token id outside of 0 to 99"),
        (reply(0, 1, [1] * 8), "would have 10 tokens, expected fewer than 10"),
    ],
    ids=str,
)
def test_an_impossible_reply_is_refused_and_nothing_of_its_request_is_taken(
    wrong: conversation_pb2.TurnReply, message: str
) -> None:
    talks = conversations()
    end(talks, 0, 1)
    end(talks, 1, 1)
    end(talks, 2, 1, num_tokens=10, is_last=True)
    for request in ([reply(1, 1), wrong], [wrong, reply(1, 1)]):
        with pytest.raises(InvalidArgument, match=message):
            talks.reply(request)
    assert arrived(talks, 0) == arrived(talks, 1) == []
    talks.reply([reply(0, 1, [1] * 7), reply(1, 1)])
    assert len(arrived(talks, 0)) == len(arrived(talks, 1)) == 1


def test_two_replies_to_one_turn_in_a_request_are_refused() -> None:
    talks = conversations()
    end(talks, 0, 1)
    with pytest.raises(InvalidArgument, match="two replies to the same turn"):
        talks.reply([reply(0, 1), reply(0, 1)])
    assert arrived(talks, 0) == []


def test_the_tokens_of_turns_and_replies_before_count_in_the_length() -> None:
    talks = conversations()
    end(talks, 0, 1, num_tokens=3)
    talks.reply([reply(0, 1, [1, 2])])
    end(talks, 0, 2, num_tokens=2)
    with pytest.raises(InvalidArgument, match="10 tokens"):
        talks.reply([reply(0, 2, [1, 2, 3])])
    talks.reply([reply(0, 2, [1, 2])])


@pytest.mark.parametrize(
    ("place", "turn"), [(9, 1), (1, 2), (1, 0), (0, 2), (2, 2), (3, 2)], ids=lambda number: str(number)
)
def test_a_turn_that_cannot_end_now_is_a_bug(place: int, turn: int) -> None:
    talks = conversations(announced := Announced())
    end(talks, 0, 1)  # has no reply
    end(talks, 2, 1, is_last=True)
    end(talks, 3, 1)
    talks.reply([reply(3, 1, is_last=True)])
    with pytest.raises(RuntimeError, match=f"rank {place % 2} has no turn {turn} of response {place} to end"):
        end(talks, place, turn)
    assert len(announced) == 3


def test_a_turn_of_another_ranks_row_is_a_bug() -> None:
    turns = conversation_pb2.TurnsEnded(turns=[conversation_pb2.Turn(place=0, turn=1, tokens=[1])])
    with pytest.raises(RuntimeError, match="rank 1 has no turn 1 of response 0"):
        conversations().turns_ended(1, turns)


def test_20_000_impossible_requests_change_nothing() -> None:
    talk = Talk()
    talks = OpenConversations(LIMITS, [range(talk.num_places)], Announced().take)
    for ended, answer in talk.story():
        talks.turns_ended(0, ended)
        talks.reply(answer)
    before = arrived(talks, 0)
    for number in range(20_000):
        with pytest.raises(InvalidArgument):
            talks.reply(impossible(random.Random(shifted(number)), talk))
    assert before
    assert arrived(talks, 0) == []
    talks.reply(talk.possible())
    assert arrived(talks, 0) == talk.possible()
