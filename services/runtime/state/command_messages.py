"""Passes messages between the callers of a running command and its ranks, on rank 0."""

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from services.runtime.command import Inbox, MessageRouter
from splitppo.v1 import worker_pb2


class CommandMessages:
    """The messages of one running command on rank 0: those of ranks become events, those of callers go to ranks.

    Thread-safe: the gRPC thread brings messages of callers, and one thread per rank those of the ranks.

    Args:
        announce: tells the command's callers of an event; they may answer it from then on.

    Attributes:
        inboxes: what each rank has still to take, by rank.
    """

    def __init__(
        self, router: MessageRouter, num_ranks: int, announce: Callable[[worker_pb2.CommandEvent], None]
    ) -> None:
        self._router = router
        self._announce = announce
        self.inboxes: list[Inbox] = [SimpleQueue() for _ in range(num_ranks)]

    def from_rank(self, rank: int, message: bytes) -> None:
        self._announce(self._router.from_rank(rank, message))

    def from_caller(self, request: Any) -> None:
        """Takes a message of a caller, whole or not at all; InvalidArgument if the role cannot take it."""
        for rank, message in self._router.from_caller(request).items():
            self.inboxes[rank].put(message)
