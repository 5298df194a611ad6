"""Parts and messages travel between ranks while a command runs, and nothing is left behind when it ends."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from services.runtime.command import Command, CommandProgress, Effect, Messages, Outcome, Rows
from services.runtime.ranks.control_channel import ControlChannel
from services.runtime.ranks.exchange import FollowerExchange, LeaderExchange
from services.runtime.ranks.parts import PartGatherer
from services.runtime.ranks.run_command import run_command
from services.runtime.state.command_messages import CommandMessages
from splitppo.batch import Batch
from splitppo.v1 import actor_pb2, conversation_pb2, worker_pb2
from tests.support.ranks import rank_processes

NUM_RANKS, NUM_MESSAGES, NUM_PARTS = 3, 40, 2
REQUEST = actor_pb2.GenerateRequest()
PLACES = Batch.from_rows(places=[[rank] for rank in range(NUM_RANKS)])


def _raise(error: Exception) -> None:
    raise error


class Echo:
    """A router whose callers answer every message of a rank with a long one that names it, or with none.

    Attributes:
        announced: rank and message, in the order of the events.
    """

    def __init__(self, *, answers: bool) -> None:
        self.messages = CommandMessages(self, NUM_RANKS, self._answer)
        self.announced: list[tuple[int, int]] = []
        self._answers = answers

    def from_rank(self, rank: int, message: bytes) -> worker_pb2.CommandEvent:
        return worker_pb2.CommandEvent(part=worker_pb2.PartReady(part=rank, num_parts=int(message)))

    def from_caller(self, request: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return request

    def _answer(self, event: worker_pb2.CommandEvent) -> None:
        rank, message = event.part.part, event.part.num_parts
        self.announced.append((rank, message))
        if self._answers:
            self.messages.from_caller({rank: _answer_to(rank, message)})


def _answer_to(rank: int, message: int) -> bytes:
    return f"{rank} {message} ".encode() * 50


def _command(received: list[bytes], *, answers: bool) -> Command:
    """Every rank but rank 0 sends messages and waits for each answer; it has parts in the midst of them."""

    def run(_request: object, rows: Batch, progress: CommandProgress) -> Outcome:
        if dist.get_rank() == 0:
            for part in (1, 2):
                progress.part_ready(part, rows.take([]), policy_version=0)
            return Outcome(columns=rows)
        for message in range(1, NUM_MESSAGES + 1) if answers else (1,):
            progress.send(str(message).encode())
            while answers and len(received) < message:
                received.extend(progress.receive(5.0))
            if message in (1, 2):
                progress.part_ready(message, rows if message == 1 else rows.take([]), policy_version=0)
        if not answers:
            progress.part_ready(2, rows.take([]), policy_version=0)
        return Outcome(columns=rows)

    messages = Messages("Reply", conversation_pb2.ReplyResponse, lambda _: True, lambda *_: Echo(answers=answers))
    rows = Rows(num_parts=lambda _: NUM_PARTS)
    return Command("Generate", actor_pb2.GenerateRequest, Effect.WRITES_SLOT, run, rows, messages=messages)


def _run(channels: Sequence[ControlChannel], *, answers: bool) -> Any:
    """Runs the command on this rank; returns what rank 0 announced and gathered, or what another rank received."""
    received: list[bytes] = []
    command = _command(received, answers=answers)
    how: Any = {"on_progress": (), "is_cancelled": lambda: False}
    if dist.get_rank() > 0:
        run_command(command, REQUEST, FollowerExchange(*channels, command, REQUEST, _raise), **how)
        return received
    parts: list[list[int]] = []
    gatherer = PartGatherer(NUM_PARTS, NUM_RANKS, lambda _, rows: parts.append(rows["places"].values.tolist()))
    echo = Echo(answers=answers)
    shares = [PLACES.take([rank]) for rank in range(NUM_RANKS)]
    exchange = LeaderExchange(*channels, shares, gatherer, echo.messages, _raise)
    _, results = run_command(command, REQUEST, exchange, **how)
    for rank in (1, 2):  # for a rank whose command has ended: nobody receives it
        echo.messages.from_caller({rank: b"late"})
    return echo.announced, parts, [rows["places"].values.tolist() for rows in results if rows is not None]


def _converse() -> list[Any]:
    """Several commands, one after the other, on the same channels."""
    channels = [ControlChannel(NUM_RANKS, dist.new_group(backend="gloo")) for _ in range(2)]
    return [_run(channels, answers=answers) for answers in (True, False, True)]


@pytest.fixture(scope="module")
def ranks() -> Any:
    with rank_processes(NUM_RANKS) as run:
        yield run


def test_every_message_arrives_and_is_answered_and_the_next_command_finds_nothing_of_it(ranks: Any) -> None:
    of_leader, *of_others = ranks(NUM_RANKS, _converse)
    sent = [(rank, message) for rank in (1, 2) for message in range(1, NUM_MESSAGES + 1)]
    assert [sorted(announced) for announced, _, _ in of_leader] == [sent, [(1, 1), (2, 1)], sent]
    assert [parts for _, parts, _ in of_leader] == [[[1, 2], []]] * 3
    assert [results for _, _, results in of_leader] == [[[0], [1], [2]]] * 3
    for rank, received in enumerate(of_others, start=1):
        answers = [_answer_to(rank, message) for message in range(1, NUM_MESSAGES + 1)]
        assert received == [answers, [], answers]


def _lose_a_rank() -> bool:
    """Rank 1 leaves without an end mark; the others notice."""
    channel, lost = ControlChannel(2, dist.new_group(backend="gloo")), threading.Event()
    if dist.get_rank() == 0:
        gatherer = PartGatherer(0, 2, lambda *_: None)
        messages = Echo(answers=False).messages
        exchange = LeaderExchange(channel, channel, None, gatherer, messages, lambda error: lost.set())
        with exchange.open():
            assert lost.wait(60)
            messages.inboxes[1].put(None)
    return lost.is_set()


def test_a_rank_that_is_lost_is_noticed_where_its_messages_are_awaited(ranks: Any) -> None:
    assert ranks(2, _lose_a_rank)[0]
