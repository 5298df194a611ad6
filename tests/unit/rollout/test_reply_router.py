"""Turns and replies of a running Generate: what is taken, what is ignored, what is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from services.rollout.reply_router import ReplyLimits, ReplyRouter
from splitppo.rpc.errors import InvalidArgument
from splitppo.v1 import conversation_pb2, worker_pb2
from tests.fuzz.replies import LIMITS, Talk, impossible
from tests.support.seeds import shifted

LIMITS_OF_10 = ReplyLimits(num_token_ids=100, max_response_length=10, max_context_length=0, takes_stop_texts=False)
CONTEXTS_OF_8 = ReplyLimits(num_token_ids=100, max_response_length=20, max_context_length=8, takes_stop_texts=True)


def four_responses(limits: ReplyLimits = LIMITS_OF_10) -> ReplyRouter:
    """Places 0 and 2 are on rank 0, places 1 and 3 on rank 1; prompts have two tokens."""
    return ReplyRouter(limits, [{0: 2, 2: 2}, {1: 2, 3: 2}])


def end(
    router: ReplyRouter, place: int, turn: int, *, num_tokens: int = 2, is_last: bool = False
) -> worker_pb2.CommandEvent:
    """Ends a turn; returns the event for the callers."""
    ended = conversation_pb2.Turn(place=place, turn=turn, tokens=[7] * num_tokens, is_last=is_last)
    return router.from_rank(place % 2, conversation_pb2.TurnsEnded(turns=[ended]).SerializeToString())


def send(
    router: ReplyRouter, replies: Sequence[conversation_pb2.TurnReply]
) -> dict[int, list[conversation_pb2.TurnReply]]:
    """Sends replies as one request; returns those that each rank gets."""
    to_ranks = router.from_caller(conversation_pb2.ReplyRequest(replies=replies))
    return {rank: list(conversation_pb2.ReplyRequest.FromString(some).replies) for rank, some in to_ranks.items()}


def reply(
    place: int,
    turn: int,
    tokens: list[int] | None = None,
    *,
    is_last: bool = False,
    begins_context: bool = False,
    **limits: Any,
) -> conversation_pb2.TurnReply:
    tokens = [1] if tokens is None and not is_last else tokens
    made = conversation_pb2.TurnReply(
        place=place, turn=turn, tokens=tokens, is_last=is_last, begins_context=begins_context
    )
    if limits:
        made.limits.CopyFrom(conversation_pb2.TurnLimits(**limits))
    return made


def test_replies_go_to_the_rank_that_has_the_row_and_turns_to_the_callers() -> None:
    router = four_responses()
    events = [end(router, place, 1) for place in (2, 1, 3)]
    assert [(turn.place, turn.turn) for event in events for turn in event.turns.turns] == [(2, 1), (1, 1), (3, 1)]

    to_ranks = send(router, [reply(3, 1, [5]), reply(2, 1, [6, 7]), reply(1, 1, is_last=True)])

    assert to_ranks == {0: [reply(2, 1, [6, 7])], 1: [reply(3, 1, [5]), reply(1, 1, is_last=True)]}


def test_a_reply_to_a_turn_that_has_one_is_ignored_also_if_it_is_another_one() -> None:
    router = four_responses()
    end(router, 0, 1)
    send(router, [reply(0, 1, [5])])
    end(router, 0, 2)
    send(router, [reply(0, 2, is_last=True)])

    assert send(router, [reply(0, 1, [5]), reply(0, 2, [8, 9])]) == {}


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
        (reply(0, 1, [1] * 8), "the response would have 10 tokens, expected fewer than 10"),
        (reply(0, 1, [1] * 8, begins_context=True), "the response would have 10 tokens, expected fewer than 10"),
        (reply(0, 1, begins_context=True, is_last=True), "the reply to turn 1 of response 0 is_last, and says"),
        (reply(0, 1, is_last=True, max_tokens=2), "the reply to turn 1 of response 0 is_last, and says"),
        (reply(0, 1, [], begins_context=True), "must have tokens, or is_last and no tokens"),
        (reply(0, 1, max_tokens=-1), "the turn after turn 1 of response 0: limits.max_tokens must be 0 or positive"),
        (reply(0, 1, stop=["a"] * 17), "limits.stop must have at most 16 texts, none empty"),
        (reply(0, 1, stop=["a", ""]), "limits.stop must have at most 16 texts, none empty"),
        (reply(0, 1, stop=["a"]), "limits.stop needs a tokenizer"),
    ],
    ids=str,
)
def test_an_impossible_reply_is_refused_and_nothing_of_its_request_is_taken(
    wrong: conversation_pb2.TurnReply, message: str
) -> None:
    router = four_responses()
    end(router, 0, 1)
    end(router, 1, 1)
    end(router, 2, 1, num_tokens=10, is_last=True)
    for request in ([reply(1, 1), wrong], [wrong, reply(1, 1)]):
        with pytest.raises(InvalidArgument, match=message):
            send(router, request)
    assert send(router, [reply(0, 1, [1] * 7), reply(1, 1)]).keys() == {0, 1}


def test_two_replies_to_one_turn_in_a_request_are_refused() -> None:
    router = four_responses()
    end(router, 0, 1)
    with pytest.raises(InvalidArgument, match="two replies to the same turn"):
        send(router, [reply(0, 1), reply(0, 1)])


def test_the_tokens_of_turns_and_replies_before_count_in_the_length() -> None:
    router = four_responses()
    end(router, 0, 1, num_tokens=3)
    send(router, [reply(0, 1, [1, 2])])
    end(router, 0, 2, num_tokens=2)
    with pytest.raises(InvalidArgument, match="10 tokens"):
        send(router, [reply(0, 2, [1, 2, 3])])
    send(router, [reply(0, 2, [1, 2])])


def test_a_context_has_room_for_what_is_in_it_alone() -> None:
    router = four_responses(CONTEXTS_OF_8)
    end(router, 0, 1, num_tokens=3)
    for wrong in (reply(0, 1, [1] * 3), reply(0, 1, [1] * 8, begins_context=True)):
        with pytest.raises(InvalidArgument, match="of response 0 its context would have 8 tokens, expected fewer than"):
            send(router, [wrong])
    begins = reply(0, 1, [1] * 5, begins_context=True, max_tokens=2, stop=["END"])
    assert send(router, [begins]) == {0: [begins]}
    end(router, 0, 2, num_tokens=2)
    with pytest.raises(InvalidArgument, match="of response 0 its context would have 8 tokens, expected fewer than 8"):
        send(router, [reply(0, 2, [1])])
    send(router, [reply(0, 2, [1], begins_context=True)])


@pytest.mark.parametrize(
    ("place", "turn"), [(9, 1), (1, 2), (1, 0), (0, 2), (2, 2), (3, 2)], ids=lambda number: str(number)
)
def test_a_turn_that_cannot_end_now_is_a_bug(place: int, turn: int) -> None:
    router = four_responses()
    end(router, 0, 1)  # has no reply
    end(router, 2, 1, is_last=True)
    end(router, 3, 1)
    send(router, [reply(3, 1, is_last=True)])
    with pytest.raises(RuntimeError, match=f"rank {place % 2} has no turn {turn} of response {place} to end"):
        end(router, place, turn)


def test_a_turn_of_another_ranks_row_is_a_bug() -> None:
    turns = conversation_pb2.TurnsEnded(turns=[conversation_pb2.Turn(place=0, turn=1, tokens=[1])])
    with pytest.raises(RuntimeError, match="rank 1 has no turn 1 of response 0"):
        four_responses().from_rank(1, turns.SerializeToString())


def test_20_000_impossible_requests_change_nothing() -> None:
    talk = Talk()
    router = ReplyRouter(LIMITS, [dict.fromkeys(range(talk.num_places), 1)])
    for ended, answer in talk.story():
        router.from_rank(0, ended.SerializeToString())
        send(router, answer)
    for number in range(20_000):
        with pytest.raises(InvalidArgument):
            send(router, impossible(random.Random(shifted(number)), talk))
    assert send(router, talk.possible()) == {0: talk.possible()}
