"""The RPC by which callers send messages to a running command: who may call it and when, without a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.runtime.command import Command, Effect, Messages, Outcome
from services.runtime.rpc.method_adapter import Method
from services.runtime.rpc.servicer import command_method, message_method
from services.runtime.state.command_call import CommandCall
from services.runtime.state.command_messages import CommandMessages
from services.runtime.state.worker import Worker
from splitppo.rpc.errors import InvalidArgument, NotIntroduced, StaleEpoch, Unavailable, WrongState
from splitppo.v1 import actor_pb2, batch_pb2, conversation_pb2, worker_pb2
from tests.unit.runtime.rpc.workers import make_worker

SLOT = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1)


class FirstPlace:
    """A router that takes replies to place 0, of which rank 0 has said that it waits."""

    def from_rank(self, rank: int, message: bytes) -> worker_pb2.CommandEvent:
        return worker_pb2.CommandEvent(turns=conversation_pb2.TurnsEnded.FromString(message))

    def from_caller(self, request: conversation_pb2.ReplyRequest) -> Mapping[int, bytes]:
        if any(reply.place for reply in request.replies):
            raise InvalidArgument("place 0 alone waits")
        return {0: b"a reply"}


MESSAGES = Messages("Reply", conversation_pb2.ReplyResponse, lambda _: True, lambda *_: FirstPlace())
GENERATE = Command("Generate", actor_pb2.GenerateRequest, Effect.WRITES_SLOT, lambda *_: Outcome(), messages=MESSAGES)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return make_worker(tmp_path)


def reply_method(worker: Worker) -> Method:
    return message_method(worker, GENERATE, MESSAGES)


def running(worker: Worker) -> CommandCall:
    """A Generate on SLOT, which has sent a message."""
    header = worker_pb2.CommandHeader(run_id="run", epoch=1, request_id="one")
    call = CommandCall(GENERATE, actor_pb2.GenerateRequest(header=header, slot=SLOT))
    worker.command_queue.admit(call, worker.stored_reply)
    assert worker.command_queue.take(0.0) is call
    call.messages = CommandMessages(FirstPlace(), 1, call.announce)
    turns = conversation_pb2.TurnsEnded(turns=[conversation_pb2.Turn(place=0, turn=1, tokens=[5])])
    call.messages.from_rank(0, turns.SerializeToString())
    return call


def request(slot: batch_pb2.Slot = SLOT, *, epoch: int = 1, place: int = 0) -> conversation_pb2.ReplyRequest:
    reply = conversation_pb2.TurnReply(place=place, turn=1, tokens=[7])
    return conversation_pb2.ReplyRequest(run_id="run", epoch=epoch, slot=slot, replies=[reply])


def num_taken(call: CommandCall) -> int:
    assert call.messages is not None
    return call.messages.inboxes[0].qsize()


async def test_a_message_is_taken_and_answered_at_once(worker: Worker) -> None:
    call = running(worker)
    assert await reply_method(worker)(request(), None) == conversation_pb2.ReplyResponse()
    assert num_taken(call) == 1


async def test_a_client_that_joins_gets_the_messages_so_far_again(worker: Worker) -> None:
    call = running(worker)
    joined = command_method(worker, GENERATE)(call.request, None)
    event = await anext(joined)
    assert [(turn.place, turn.turn) for turn in event.turns.turns] == [(0, 1)]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (request(epoch=0), StaleEpoch),
        (request(epoch=2), WrongState),
        (request(batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1, part=1)), WrongState),
        (request(batch_pb2.Slot()), WrongState),
        (request(place=1), InvalidArgument),
    ],
)
async def test_who_is_wrong_changes_nothing(
    worker: Worker, wrong: conversation_pb2.ReplyRequest, error: type[Exception]
) -> None:
    call = running(worker)
    with pytest.raises(error):
        await reply_method(worker)(wrong, None)
    assert num_taken(call) == 0


def _end(worker: Worker, call: CommandCall) -> None:
    call.resolve(worker_pb2.CommandResult())


def _cancel(worker: Worker, call: CommandCall) -> None:
    call.cancel("other weights are being loaded")


def _drain(worker: Worker, call: CommandCall) -> None:
    worker.drain()


def _restart(worker: Worker, call: CommandCall) -> None:
    worker.fencing.epoch = 0


def _exchange_nothing(worker: Worker, call: CommandCall) -> None:
    call.messages = None


@pytest.mark.parametrize(
    ("happens", "error", "message"),
    [
        (_end, WrongState, "no Generate that takes Reply is running on the experience slot of step 1"),
        (_exchange_nothing, WrongState, "no Generate that takes Reply is running on the experience slot of step 1"),
        (_cancel, WrongState, "Generate was cancelled: other weights are being loaded"),
        (_drain, Unavailable, "draining"),
        (_restart, NotIntroduced, "Handshake"),
    ],
)
async def test_no_message_is_taken_when_the_command_goes_on_no_more(
    worker: Worker, happens: Any, error: type[Exception], message: str
) -> None:
    call = running(worker)
    happens(worker, call)
    with pytest.raises(error, match=message):
        await reply_method(worker)(request(), None)


async def test_an_idle_worker_takes_no_message(worker: Worker) -> None:
    with pytest.raises(WrongState, match="no Generate that takes Reply is running"):
        await reply_method(worker)(request(), None)
