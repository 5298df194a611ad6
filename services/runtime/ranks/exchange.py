"""Carries what the ranks of a group send each other for one command: rows, finished parts, messages, results.

    rank 0                                       every other rank
    take_rows      ---- its rows ------------->  take_rows
    while open:                                  while open:
      a thread     <--- parts, messages -------    the command itself, by `add_part` and `send`
                   <--- the end ---------------  when the command has ended
      a thread     ---- messages ------------->    a thread, into `inbox`
                   ---- the end -------------->  then the thread ends
    hand_in        <--- its columns -----------  hand_in

Rows and results travel on the channel of the orders. Parts and messages have a channel (a process group) of their own,
in both directions, with threads that live as long as the command. A rank whose command has ended goes on to receive, so
that nothing is left behind on the channel for the next command.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from services.runtime.command import Command, Inbox, Outcome
from services.runtime.ranks.control_channel import ControlChannel
from services.runtime.ranks.parts import PartGatherer, check_streamed
from services.runtime.state.command_messages import CommandMessages
from splitppo.batch import Batch

# Sent in place of the number of a part.
_END = 0
_MESSAGE = -1


class Exchange(Protocol):
    """One rank's side of a command: what it gets from the other ranks, and what it sends them."""

    @property
    def inbox(self) -> Inbox | None:
        """The messages of callers for this rank; None if the command exchanges no messages."""

    def take_rows(self) -> Batch | None:
        """Returns this rank's rows of the command; None if the command works on none. All ranks call it together."""

    def open(self) -> AbstractContextManager[None]:
        """Carries parts and messages during the `with` block, then until the other side has ended as well.

        If the block raises, nothing is waited for: the group ends, or has one rank.
        """

    def add_part(self, part: int, columns: Batch, policy_version: int) -> None:
        """Sends this rank's rows of one part to where the part is put together."""

    def send(self, message: bytes) -> None:
        """Sends a message of this rank to the callers."""

    def hand_in(self, outcome: Outcome | None) -> Sequence[Batch | None]:
        """Brings the result columns of all ranks to rank 0, which returns them by rank; other ranks return nothing.

        `outcome` is None if this rank has stopped the cancelled command.

        Raises:
            CommandCancelled: on rank 0, another rank has stopped it.
        """


class LeaderExchange:
    """The side of rank 0, which puts parts together, and passes messages between callers and ranks.

    Args:
        shares: the rows of each rank; None if the command works on none.
        messages: None if the command exchanges none.
        on_error: called, in the thread of that rank, if a rank is lost or has sent what does not fit.
    """

    def __init__(
        self,
        channel: ControlChannel,
        side_channel: ControlChannel,
        shares: Sequence[Batch] | None,
        gatherer: PartGatherer,
        messages: CommandMessages | None,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._channel = channel
        self._side_channel = side_channel
        self._shares = shares
        self._gatherer = gatherer
        self._messages = messages
        self._on_error = on_error

    @property
    def inbox(self) -> Inbox | None:
        return None if self._messages is None else self._messages.inboxes[0]

    def take_rows(self) -> Batch | None:
        if self._shares is None:
            return None
        self._channel.scatter(self._shares)
        return self._shares[0]

    def open(self) -> AbstractContextManager[None]:
        work: dict[str, Callable[[], None]] = {}
        for rank in range(1, self._side_channel.world_size):
            if self._gatherer.num_parts or self._messages is not None:
                work[f"parts-{rank}"] = partial(self._receive, rank)
            if self._messages is not None:
                work[f"messages-{rank}"] = partial(self._send_messages, self._messages.inboxes[rank], rank)
        return in_threads(work, self._on_error)

    def _receive(self, rank: int) -> None:
        """Receives parts and messages of another rank until its command has ended.

        What a rank sends begins with two numbers: _END, _MESSAGE or the number of a part, and the version of the part's
        weights.
        """
        while True:
            kind_or_part, policy_version = self._side_channel.receive_numbers(2, rank)
            if kind_or_part == _END:
                break
            if kind_or_part == _MESSAGE:
                assert self._messages is not None, "a rank sends messages only in a command that exchanges them"
                self._messages.from_rank(rank, self._side_channel.receive_bytes(rank))
                continue
            columns = self._side_channel.receive(rank)
            assert columns is not None, "a part has rows, if perhaps none of this rank"
            self._gatherer.add(rank, kind_or_part, columns, policy_version)
        if self._messages is not None:
            self._messages.inboxes[rank].put(None)

    def _send_messages(self, inbox: Inbox, rank: int) -> None:
        """Sends another rank its messages, until its command has ended."""
        while (message := inbox.get()) is not None:
            self._side_channel.send_bytes(message, rank)
        self._side_channel.send_bytes(b"", rank)

    def add_part(self, part: int, columns: Batch, policy_version: int) -> None:
        self._gatherer.add(0, part, columns, policy_version)

    def send(self, message: bytes) -> None:
        assert self._messages is not None, "the command has an inbox"
        self._messages.from_rank(0, message)

    def hand_in(self, outcome: Outcome | None) -> Sequence[Batch | None]:
        return self._channel.gather(outcome.columns if outcome is not None else None)


class FollowerExchange:
    """The side of every rank but rank 0; `on_error` is called, in a thread, if rank 0 is lost."""

    def __init__(
        self,
        channel: ControlChannel,
        side_channel: ControlChannel,
        command: Command,
        request: Any,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._channel = channel
        self._side_channel = side_channel
        self._command = command
        self._request = request
        self._on_error = on_error
        self._num_parts = 0
        self.inbox: Inbox | None = SimpleQueue() if command.exchanges_messages(request) else None

    def take_rows(self) -> Batch | None:
        if not self._command.effect.has_rows:
            return None
        rows = self._channel.receive(0)
        self._num_parts = self._command.num_parts_of(self._request, rows)
        return rows

    @contextmanager
    def open(self) -> Iterator[None]:
        with in_threads({} if self.inbox is None else {"messages": self._receive}, self._on_error):
            yield
            if self._num_parts or self.inbox is not None:
                self._side_channel.send_numbers((_END, 0), 0)

    def _receive(self) -> None:
        """Receives the messages of callers until rank 0 sends the end."""
        assert self.inbox is not None
        while message := self._side_channel.receive_bytes(0):
            self.inbox.put(message)

    def add_part(self, part: int, columns: Batch, policy_version: int) -> None:
        check_streamed(part, self._num_parts)
        self._side_channel.send_numbers((part, policy_version), 0)
        self._side_channel.send(columns, 0)

    def send(self, message: bytes) -> None:
        self._side_channel.send_numbers((_MESSAGE, 0), 0)
        self._side_channel.send_bytes(message, 0)

    def hand_in(self, outcome: Outcome | None) -> Sequence[Batch | None]:
        if outcome is None:
            self._channel.send_cancelled(0)
        else:
            self._channel.send(outcome.columns, 0)
        return ()


@contextmanager
def in_threads(work: Mapping[str, Callable[[], None]], on_error: Callable[[Exception], None]) -> Iterator[None]:
    """Runs functions in threads of these names during the `with` block, then waits for their ends.

    `on_error` is called, in its thread, with the error of a function. If the block raises, the threads are left alone.
    """

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - nothing is above a thread
            on_error(error)

    threads = [threading.Thread(target=run, args=(work[name],), name=name, daemon=True) for name in work]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()
