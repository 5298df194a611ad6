"""Turns and replies of conversations, as positional arguments say."""

from __future__ import annotations

from collections.abc import Iterable

from splitppo.v1.conversation_pb2 import Turn, TurnReply


def ended_turn(place: int, turn: int, tokens: Iterable[int], *, is_last: bool = False) -> Turn:
    return Turn(place=place, turn=turn, tokens=tokens, is_last=is_last)


def turn_reply(place: int, turn: int, tokens: Iterable[int] = (), *, is_last: bool = False) -> TurnReply:
    return TurnReply(place=place, turn=turn, tokens=tokens, is_last=is_last)
