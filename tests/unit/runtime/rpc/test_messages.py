"""The RPC Reply: who may call it and when, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.runtime.role import Command, Outcome, ReplyLimits
from services.runtime.rpc.servicer import WorkerServicer, command_method
from services.runtime.state.command_call import CommandCall
from services.rollout.reply_router import OpenConversations
from services.runtime.state.worker import Worker
from splitppo.rpc.errors import InvalidArgument, NotIntroduced, StaleEpoch, Unavailable, WrongState
from splitppo.v1 import actor_pb2, batch_pb2, conversation_pb2, worker_pb2
from tests.unit.runtime.rpc.workers import make_worker

SLOT = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1)
GENERATE = Command("Generate", actor_pb2.GenerateRequest, lambda *_: Outcome(), cancellable=True)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return make_worker(tmp_path)


def running(worker: Worker) -> CommandCall:
    """A Generate on SLOT, whose response 0 waits after its first turn."""
    header = worker_pb2.CommandHeader(run_id="run", epoch=1, request_id="one")
    call = CommandCall(GENERATE, actor_pb2.GenerateRequest(header=header, slot=SLOT))
    worker.command_queue.admit(call, worker.stored_reply)
    assert worker.command_queue.take(0.0) is call
    call.conversations = OpenConversations(ReplyLimits(100, 10), [[0, 1]], call.turns_ended)
    turns = conversation_pb2.TurnsEnded(turns=[conversation_pb2.Turn(place=0, turn=1, tokens=[5])])
    call.conversations.turns_ended(0, turns)
    return call


def request(slot: batch_pb2.Slot = SLOT, *, epoch: int = 1, place: int = 0) -> conversation_pb2.ReplyRequest:
    reply = conversation_pb2.TurnReply(place=place, turn=1, tokens=[7])
    return conversation_pb2.ReplyRequest(run_id="run", epoch=epoch, slot=slot, replies=[reply])


def num_taken(call: CommandCall) -> int:
    assert call.conversations is not None
    return call.conversations.replies[0].qsize()


async def test_a_reply_is_taken_once(worker: Worker) -> None:
    call, servicer = running(worker), WorkerServicer(worker)
    for _ in range(2):
        assert await servicer.reply(request(), None) == conversation_pb2.ReplyResponse()
    assert num_taken(call) == 1


async def test_a_client_that_joins_gets_the_turns_so_far_again(worker: Worker) -> None:
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
        await WorkerServicer(worker).reply(wrong, None)
    assert num_taken(call) == 0


def _end(worker: Worker, call: CommandCall) -> None:
    call.resolve(worker_pb2.CommandResult())


def _cancel(worker: Worker, call: CommandCall) -> None:
    call.cancel("other weights are being loaded")


def _drain(worker: Worker, call: CommandCall) -> None:
    worker.drain()


def _restart(worker: Worker, call: CommandCall) -> None:
    worker.fencing.epoch = 0


def _stop_talking(worker: Worker, call: CommandCall) -> None:
    call.conversations = None


@pytest.mark.parametrize(
    ("happens", "error", "message"),
    [
        (_end, WrongState, "no conversation of the experience slot of step 1 is going on"),
        (_stop_talking, WrongState, "no conversation of the experience slot of step 1 is going on"),
        (_cancel, WrongState, "Generate was cancelled: other weights are being loaded"),
        (_drain, Unavailable, "draining"),
        (_restart, NotIntroduced, "Handshake"),
    ],
)
async def test_no_reply_is_taken_when_the_command_goes_on_no_more(
    worker: Worker, happens: Any, error: type[Exception], message: str
) -> None:
    call = running(worker)
    happens(worker, call)
    with pytest.raises(error, match=message):
        await WorkerServicer(worker).reply(request(), None)


async def test_an_idle_worker_has_no_conversation(worker: Worker) -> None:
    with pytest.raises(WrongState, match="no conversation"):
        await WorkerServicer(worker).reply(request(), None)
