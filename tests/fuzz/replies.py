"""Replies that cannot be: sent to a command whose conversations wait, they change nothing.

The command is that of the toy role, in a group of one rank. `Talk` says how far its conversations have come.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from services.rollout.reply_router import ReplyLimits
from splitppo.rpc.credentials import PLAINTEXT
from splitppo.v1 import conversation_pb2
from tests.fuzz.fuzzer import ALLOWED
from tests.integration.runtime import toy
from tests.integration.runtime.client import Client, experience, result
from tests.integration.runtime.conftest import MODULE, write_config
from tests.support.groups import Group

LIMITS: ReplyLimits = toy.REPLY_LIMITS
REPLY = "/splitppo.v1.ActorService/Reply"
INT32 = (-1, -(1 << 31), (1 << 31) - 1)


def reply(place: int, turn: int, *tokens: int, is_last: bool = False) -> conversation_pb2.TurnReply:
    return conversation_pb2.TurnReply(place=place, turn=turn, tokens=tokens, is_last=is_last)


class Talk:
    """Five conversations: 0 and 4 wait after their first turn, 1 after its second one, 2 and 3 have ended."""

    num_places = 5
    taken = (reply(1, 1, 5), reply(2, 1, 5), reply(3, 1, is_last=True), reply(2, 2, 6))
    responses = ([0, 1, 8, 0, 2], [1, 1, 5, 1, 2, 9, 9, 1, 3], [2, 1, 5, 2, 2, 6, 2, 3], [3, 1], [4, 1])

    def story(self) -> Iterator[tuple[conversation_pb2.TurnsEnded, Sequence[conversation_pb2.TurnReply]]]:
        """The turns that have ended so far, and the replies to them."""
        yield self._turns(1, range(5)), self.taken[:3]
        yield self._turns(2, (1, 2)), self.taken[3:]
        yield self._turns(3, (2,)), ()

    def possible(self) -> list[conversation_pb2.TurnReply]:
        """Replies to the turns that wait."""
        return [reply(0, 1, 8), reply(1, 2, 9, 9), reply(4, 1, is_last=True)]

    def _turns(self, turn: int, places: Sequence[int]) -> conversation_pb2.TurnsEnded:
        is_last = turn == toy.MAX_TURNS
        turns = [
            conversation_pb2.Turn(place=p, turn=turn, tokens=toy.turn_of(p, turn), is_last=is_last) for p in places
        ]
        return conversation_pb2.TurnsEnded(turns=turns)


def impossible(draw: random.Random, talk: Talk) -> list[conversation_pb2.TurnReply]:
    """The replies of a request: some may be in order, one is not."""
    others = [*talk.possible(), *talk.taken]
    request = draw.sample(others, draw.randrange(len(others)))
    good = draw.choice(talk.possible())
    wrong = _wrong(draw, good, talk)
    request = [one for one in request if (one.place, one.turn) != (wrong.place, wrong.turn)]
    request.insert(draw.randrange(len(request) + 1), wrong)
    if draw.random() < 0.1:
        request = [good, *(one for one in request if one != good), good]
    return request


def _wrong(draw: random.Random, good: conversation_pb2.TurnReply, talk: Talk) -> conversation_pb2.TurnReply:
    """A reply that cannot be, in place of a good one."""
    tokens = list(good.tokens) or [3]
    wrong = reply(good.place, good.turn, *tokens)
    match draw.randrange(9):
        case 0:
            wrong.place = draw.choice((talk.num_places, *INT32))
        case 1:
            wrong.turn = draw.choice((0, good.turn + 1, *INT32))
        case 2:
            wrong = reply(2, toy.MAX_TURNS, *draw.choice(((), (1,))))
            wrong.is_last = not wrong.tokens
        case 3:
            wrong.is_last = True
        case 4:
            del wrong.tokens[:]
        case 5:
            wrong.tokens.insert(draw.randrange(len(tokens) + 1), draw.choice((LIMITS.num_token_ids, *INT32)))
        case 6:
            wrong.tokens.extend([1] * draw.choice((LIMITS.max_response_length, 2000)))
        case 7:
            wrong.begins_context = True
            wrong.tokens.extend([1] * LIMITS.max_context_length)
        case 8:
            wrong.limits.max_tokens = draw.choice((0, *INT32[:2]))
            wrong.limits.stop.extend(draw.choice(([""], ["a"] * 17)))
    return wrong


def fuzz_replies(folder: Path, num_inputs: int, seed: int) -> list[str]:
    """Sends impossible requests to a group whose conversations wait; returns what must never happen, in words."""
    talk, config_file = Talk(), write_config(folder)
    group = Group(MODULE, config_file, folder, "critic", overrides=())
    try:
        group.wait_ready()
        client = Client(group.address, config_file)
        try:
            client.handshake()
            return _fuzz(client, talk, num_inputs, seed)
        finally:
            client.close()
    finally:
        group.stop()


def _fuzz(client: Client, talk: Talk, num_inputs: int, seed: int) -> list[str]:
    failures = []
    client.put(experience(1), prompts=[[1]] * talk.num_places)
    stream = client.converse(experience(1), base_step=0, timeout_s=3600.0)
    for ended, answers in talk.story():
        known: list[conversation_pb2.Turn] = []
        while len(known) < len(ended.turns):
            known += next(stream).turns.turns
        client.reply(experience(1), *answers)
    with PLAINTEXT.channel(client.address, grpc) as channel:
        send: Any = channel.unary_unary(REPLY)
        for number in range(num_inputs):
            draw = random.Random(f"{seed}-{number}")
            message = _message(draw, client, talk)
            try:
                send(message, timeout=20.0)
                failures.append(f"reply {number} was taken")
            except grpc.RpcError as error:
                if error.code() not in ALLOWED:
                    failures.append(f"reply {number}: {error.code().name}: {error.details()}")
    client.reply(experience(1), *talk.possible())
    while not any(turn.place == 0 for turn in next(stream).turns.turns):
        pass
    client.reply(experience(1), reply(0, 2, is_last=True))
    result(stream)
    responses = [row.tolist() for row in client.get(experience(1), "responses")["responses"].rows()]
    if responses != list(talk.responses):
        failures.append(f"the responses are {responses}")
    return failures


def _message(draw: random.Random, client: Client, talk: Talk) -> bytes:
    """A request that is wrong somewhere."""
    request = conversation_pb2.ReplyRequest(run_id=client.run_id, epoch=client.epoch, slot=experience(1))
    match draw.randrange(8):
        case 0:
            return draw.randbytes(int(2 ** draw.uniform(0, 17)))
        case 1:
            wrong = conversation_pb2.ReplyRequest(run_id=draw.choice(("", "other")), epoch=draw.choice((0, 2, -1)))
            request.MergeFrom(wrong)
            request.run_id = wrong.run_id
            request.replies.extend(talk.possible())
        case 2:
            request.slot.step = draw.choice((0, 2, *INT32))
            request.slot.kind = draw.choice((0, 1, 2, 99))
            request.replies.extend(talk.possible())
        case _:
            request.replies.extend(impossible(draw, talk))
    return request.SerializeToString()
