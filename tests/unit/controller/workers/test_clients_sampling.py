"""Conversations by the client of a group that samples: turns, and replies to them."""

from typing import Any

import grpc
import grpc.aio
import pytest

from controller.workers.command import Limits
from splitppo.rpc.errors import InvalidArgument, Unavailable, WrongState
from splitppo.rpc.wire_format import MAX_REQUEST_BYTES
from splitppo.v1 import conversation_pb2
from tests.support.fake_worker import SLOT, Connect, Events, FakeWorker, generate, result, turns


def reply(place: int, num_tokens: int = 1) -> conversation_pb2.TurnReply:
    return conversation_pb2.TurnReply(place=place, turn=1, tokens=[100_000] * num_tokens)


async def test_turns_are_told_as_they_come_and_all_again_after_a_lost_connection(connect: Connect) -> None:
    async def break_off(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield turns(0, 1)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")

    async def go_on(worker: FakeWorker, request: Any, context: Any) -> Events:
        yield turns(0, 1)
        yield turns(1, turn=2)
        yield result()

    seen: list[list[tuple[int, int, list[int]]]] = []

    def on_turns(ended: conversation_pb2.TurnsEnded) -> None:
        seen.append([(turn.place, turn.turn, list(turn.tokens)) for turn in ended.turns])

    worker, conversation = (
        FakeWorker([break_off, go_on]),
        conversation_pb2.Conversation(max_turn_length=7, reply_steps=3),
    )
    await generate(await connect(worker), conversation=conversation, on_turns=on_turns)

    first = [(0, 1, [0]), (1, 1, [1])]
    assert seen == [first, first, [(1, 2, [1])]]
    assert [request.conversation for request in worker.requests] == [conversation] * 2


async def test_a_generation_without_a_conversation_sends_none(connect: Connect) -> None:
    worker = FakeWorker()
    await generate(await connect(worker))
    assert not worker.requests[0].HasField("conversation")


async def test_replies_name_the_caller_and_the_slot(connect: Connect) -> None:
    worker = FakeWorker()
    client = await connect(worker)
    await client.reply(SLOT, [reply(0), reply(3)])
    assert worker.requests == [
        conversation_pb2.ReplyRequest(run_id="run", epoch=2, slot=SLOT, replies=[reply(0), reply(3)])
    ]


async def test_many_replies_are_several_requests_under_the_limit(connect: Connect) -> None:
    replies = [reply(place, 1 + 500 * (place % 17)) for place in range(100)]
    worker = FakeWorker()
    client = await connect(worker)
    await client.reply(SLOT, replies)
    assert [one for request in worker.requests for one in request.replies] == replies
    assert max(request.ByteSize() for request in worker.requests) <= MAX_REQUEST_BYTES
    assert len(worker.requests) < 25  # 100 replies of 1.2 MB


async def test_replies_are_sent_again_after_a_lost_connection(connect: Connect) -> None:
    worker = FakeWorker(refusals=[Unavailable("connection reset")])
    client = await connect(worker)
    await client.reply(SLOT, [reply(0)])
    first, second = worker.requests
    assert first == second


@pytest.mark.parametrize("error", [InvalidArgument("turn 2 has not ended"), WrongState("no conversation")])
async def test_replies_that_are_refused_are_an_error_at_once(connect: Connect, error: Exception) -> None:
    worker = FakeWorker(refusals=[error])  # type: ignore[list-item]
    client = await connect(worker, limits=Limits(reconnect_timeout_s=0.05))
    with pytest.raises(type(error), match=rf"^actor, step 5, Reply: {error}$"):
        await client.reply(SLOT, [reply(0)])
    assert len(worker.requests) == 1
