"""Streams the results of a command in parts: ranks send finished rows of a part, rank 0 puts the part together.

    rank 0, main thread          rank 0, a thread per other rank          ranks 1..N-1
    run                          receive  <---- part, its rows ---------- run
      own rows of a part ---+------+
                            v
              all rows of the part are there: keep them, tell the callers
    run has ended                receive  <---- the end ----------------- run has ended

The column `places` of a rank's rows says which rows of the whole they are; a rank may have no rows of a part. The
threads live as long as the command. They have a process group of their own, apart from that of the orders. The turns of
conversations travel in the same way; what is said to them comes from rank 0 (replies.py).
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from services.runtime.ranks.control_channel import ControlChannel
from services.runtime.role import Command
from services.rollout.reply_router import OpenConversations
from splitppo.batch import Batch, concatenate
from splitppo.v1 import conversation_pb2, worker_pb2

# Sent in place of the number of a part.
_END = 0
_TURNS = -1


def num_parts_of(command: Command, request: Any, rows: object) -> int:
    """Returns in how many parts the results of a command on these rows are sent on; 0 if it is not streamed."""
    num_parts = command.num_parts(request) if isinstance(rows, Batch) and "places" in rows else 0
    return num_parts if num_parts > 1 else 0


class PartGatherer:
    """Puts the parts of one streamed command together on rank 0, from the rows that all ranks send. Thread-safe.

    Args:
        num_parts: 0 if the command is not streamed.
        num_ranks: number of ranks that report each part.
        deliver: takes a complete part: the event for the callers, and all its rows by ascending place. Called in any
            thread, for one part at a time.
    """

    def __init__(self, num_parts: int, num_ranks: int, deliver: Callable[[worker_pb2.PartReady, Batch], None]) -> None:
        self._num_parts = num_parts
        self._num_ranks = num_ranks
        self._deliver = deliver
        # By part and rank: rows and the version of the weights that made them, until all ranks have sent theirs.
        self._missing: dict[int, dict[int, tuple[Batch, int]]] = {part: {} for part in range(1, num_parts + 1)}
        self._lock = threading.Lock()

    @property
    def missing(self) -> list[int]:
        """The numbers of the incomplete parts, sorted: not all ranks have sent their rows of these parts yet."""
        with self._lock:
            return sorted(self._missing)

    def add(self, rank: int, part: int, columns: Batch, policy_version: int) -> None:
        """Adds one rank's rows of a part, and delivers the part once complete; RuntimeError for a bug in a role."""
        if not self._num_parts:
            raise RuntimeError(f"part {part} was reported, but the command is not streamed")
        with self._lock:
            missing = self._missing.get(part)
            if missing is None or rank in missing:
                raise RuntimeError(f"rank {rank} has no part {part} left to report")
            missing[rank] = columns, policy_version
            if len(missing) < self._num_ranks:
                return
            del self._missing[part]
            if len(versions := {version for _, version in missing.values()}) > 1:
                raise RuntimeError(f"part {part} was made with weights of versions {sorted(versions)}")
            rows = concatenate([columns for columns, _ in missing.values()])
            rows = rows.take(np.argsort(rows["places"].values))
            ready = worker_pb2.PartReady(part=part, num_parts=self._num_parts, policy_version=policy_version)
            self._deliver(ready, rows)

    def receiving(
        self,
        channel: ControlChannel,
        on_error: Callable[[Exception], None],
        conversations: OpenConversations | None = None,
    ) -> AbstractContextManager[None]:
        """Receives the other ranks' parts and turns in threads during the `with` block, then waits for their end marks.

        `on_error` is called, in the thread of that rank, if a rank is lost or has sent what does not fit.
        """

        def receive(rank: int) -> None:
            while (message := channel.receive_numbers(2, rank))[0] != _END:
                if message[0] == _TURNS:
                    assert conversations is not None
                    turns = conversation_pb2.TurnsEnded.FromString(channel.receive_bytes(rank))
                    conversations.turns_ended(rank, turns)
                    continue
                columns = channel.receive(rank)
                assert columns is not None
                self.add(rank, message[0], columns, message[1])
            if conversations is not None:
                conversations.replies[rank].put(None)

        others = range(1, channel.world_size if self._num_parts or conversations else 1)
        return in_threads({f"parts-{rank}": partial(receive, rank) for rank in others}, on_error)


@contextmanager
def in_threads(work: Mapping[str, Callable[[], None]], on_error: Callable[[Exception], None]) -> Iterator[None]:
    """Runs functions in threads of these names during the `with` block, then waits for their ends.

    `on_error` is called, in its thread, with the error of a function.
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


@dataclass(frozen=True)
class PartSender:
    """Sends rank 0 what another rank has finished while a command runs: rows of parts, and turns."""

    channel: ControlChannel
    num_parts: int

    def send_part(self, part: int, columns: Batch, policy_version: int) -> None:
        """Sends this rank's rows of one part."""
        if not self.num_parts:
            raise RuntimeError(f"part {part} was reported, but the command is not streamed")
        self.channel.send_numbers((part, policy_version), 0)
        self.channel.send(columns, 0)

    def send_turns(self, turns: conversation_pb2.TurnsEnded) -> None:
        """Sends turns of this rank's conversations that have ended."""
        self.channel.send_numbers((_TURNS, 0), 0)
        self.channel.send_bytes(turns.SerializeToString(), 0)


@contextmanager
def sending(channel: ControlChannel, num_parts: int, *, takes_replies: bool = False) -> Iterator[PartSender]:
    """Gives the `with` block what sends parts and turns to rank 0; then sends a mark that none follow."""
    yield PartSender(channel, num_parts)
    if num_parts or takes_replies:
        channel.send_numbers((_END, 0), 0)
