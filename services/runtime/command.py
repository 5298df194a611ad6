"""The commands of a worker group: what a role declares of each of them, and what the runtime does with it.

The runtime moves rows of batches and bytes of messages, and orders work. It treats every command by its `Effect`,
never by its name.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, Protocol

import numpy as np
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from numpy.typing import NDArray

from splitppo import failpoints
from splitppo.batch import Batch
from splitppo.rpc.errors import InvalidArgument, Place
from splitppo.v1 import worker_pb2

# The row indices of each rank; they contain every row once.
Shard = Callable[[Batch, int], Sequence[NDArray[np.int64]]]

# The messages for one rank; None is the end mark.
Inbox = SimpleQueue[bytes | None]


class Effect(Enum):
    """The part of a group's state that a command changes: the runtime acts by this alone.

    These rules are the same for every effect. The caller must be the newest controller, and must name the committed
    step. The same request id joins the open call. Each rank has to report progress within
    `services.progress_timeout_s`, else the heartbeat ends the group. A rank that fails ends a group of several ranks.
    """

    READS = auto()
    """Changes nothing that the service answers for.

    Nothing is remembered of the call: a repetition of an answered request runs again. The command is never cancelled.
    """

    SAVES = auto()
    """Writes the state of the committed step to storage.

    The reply comes when that is durable; the next commands do not wait for it. The ledger remembers the last such
    reply, and answers a repetition of its request. The command is never cancelled.
    """

    WRITES_SLOT = auto()
    """Adds columns to the rows of its slot, or replaces them by its results.

    The slot remembers the reply, until new rows are put to it. As nothing else is changed, the command is cancelled
    when a controller takes over, other weights are to be loaded, or the service drains. A command that asks
    `CommandProgress.is_cancelled` stops then, and nothing is kept; any other one runs to its end.
    """

    TRAINS = auto()
    """Changes the weights by the rows of its slot, and commits the slot's step, which must be the next one.

    The ledger takes the step and the reply together, and answers a repetition of the request. The slots of the step are
    dropped. If the command fails after an optimizer step, the service is dirty until weights are loaded. The
    command is never cancelled.
    """

    LOADS = auto()
    """Gives the group the weights of a step, whatever was before: a dirty service, or one without weights, takes it.

    When the command arrives, calls that wait are refused, and the running one is cancelled if its effect allows it. The
    step becomes the committed one: with the ledger that was saved with the weights, or else in a ledger that begins
    with this reply. All slots are emptied; only weights of a later step without a ledger leave the slots after their
    step. If the command fails while ranks run it, the service is dirty; if it succeeds, clean. The command is never
    cancelled.
    """

    @property
    def has_rows(self) -> bool:
        """True if the command works on the rows of a slot."""
        return self in (Effect.WRITES_SLOT, Effect.TRAINS)

    @property
    def sets_step(self) -> bool:
        """True if the command changes the committed step."""
        return self in (Effect.TRAINS, Effect.LOADS)

    @property
    def can_be_cancelled(self) -> bool:
        return self is Effect.WRITES_SLOT


class CommandCancelled(Exception):
    """A rank has stopped a cancelled command early; the rank's state is as before it, and the group goes on."""


@dataclass
class CommandProgress:
    """The runtime as a running command sees it on one rank: takes reports and messages, and says if to go on.

    Attributes:
        point: the name of the command as a failpoint.
        on_progress: functions that are called with done, total and phase.
        on_part: called with the number of a part, this rank's rows of the part, and the version of the weights.
        is_cancelled: returns True once nobody needs the command any more: a command that only writes its slot may then
            raise CommandCancelled. Ranks learn it at different times, up to half a second apart, and some may have
            finished before. So no rank may wait for another one between the first call and the end of the command.
        on_message: takes a message to the command's callers.
        inbox: the messages of callers for this rank; None if the command exchanges no messages (`Command.messages`).
    """

    point: str
    on_progress: Sequence[Callable[[int, int, str], None]]
    on_part: Callable[[int, Batch, int], None]
    is_cancelled: Callable[[], bool]
    on_message: Callable[[bytes], None] = lambda _: None
    inbox: Inbox | None = None

    def __call__(self, done: int, total: int, phase: str) -> None:
        """Reports this rank's progress in the command, per token or micro-batch; callers see rank 0's reports alone."""
        for tell in self.on_progress:
            tell(done, total, phase)
        failpoints.hit(self.point)

    def part_ready(self, part: int, columns: Batch, *, policy_version: int) -> None:
        """Reports this rank's complete rows of one part (from 1) of a streamed command, as in `Outcome.columns`.

        To be called if the command is streamed, then once for every part on every rank, also without rows.
        `columns` has `places`, too: which rows of the whole these are.
        """
        self.on_part(part, columns, policy_version)
        failpoints.hit(f"{self.point}.part")

    def send(self, message: bytes) -> None:
        """Sends a message from this rank to the callers; only in a command that exchanges messages."""
        self._inbox()
        self.on_message(message)

    def receive(self, timeout_s: float) -> Sequence[bytes]:
        """Takes the messages for this rank that have arrived since the last call.

        If there are none, it waits for the first one, at most for this time.
        """
        inbox = self._inbox()
        messages: list[bytes | None] = []
        with suppress(Empty):
            messages.append(inbox.get(timeout=timeout_s))
            while True:
                messages.append(inbox.get_nowait())
        return [message for message in messages if message is not None]

    def _inbox(self) -> Inbox:
        if self.inbox is None:
            raise RuntimeError(f"{self.point} exchanges no messages")
        return self.inbox


@dataclass(frozen=True)
class Outcome:
    """The results of one command on one rank; the command's function returns an Outcome on every rank.

    Attributes:
        columns: new columns for this rank's rows, in the order received; the runtime gathers them into the slot. A
            command that expands rows returns a multiple of its rows, grouped by input row. The columns of a command
            that trains replace the rows of its slot, until the next step is committed.
        metrics: already reduced over ranks; values that `float` takes.
        weights_sha256: the digest of the weights, from a command that computes it.
        policy_version: the committed step whose weights made the columns.
        durable: resolves when all ranks are done, on rank 0 with the sha256 of a manifest. The reply waits for rank
            0's, the commands after it do not.
        saved_ledger: of a command that loads, the ledger that was saved with the weights (empty: of a model that was
            never trained). None: the weights have no ledger, and it begins with this command.
    """

    columns: Batch | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    weights_sha256: str = ""
    policy_version: int = 0
    durable: Future[str] | None = None
    saved_ledger: bytes | None = None


@dataclass(frozen=True)
class Rows:
    """The rows of a slot that a command works on: their columns, and how they are checked, dealt and sent on.

    Attributes:
        columns: without them in the slot the call is refused (FAILED_PRECONDITION).
        optional_columns: passed on if the slot has them.
        prepare: (request, rows) -> rows; called on rank 0 after `Command.check`. Refuses rows in the same way as
            `check`, and may add columns or drop rows. The column `places` says which rows of the whole a row becomes.
        shard: (rows, num_ranks) -> row indices of each rank; None: equally many rows for each rank.
        num_parts: takes the request and returns the number of parts. The command is streamed if it is 2 or more and
            the rows have the column `places`: finished parts are then sent on while others are still being computed.
    """

    columns: Sequence[str] = ()
    optional_columns: Sequence[str] = ()
    prepare: Callable[[Any, Batch], Batch] = lambda _, rows: rows
    shard: Shard | None = None
    num_parts: Callable[[Any], int] = lambda _: 0


class MessageRouter(Protocol):
    """A role's part in the messages of one running command, on rank 0; the runtime only carries their bytes.

    Thread-safe: the gRPC thread brings messages of callers, and one thread per rank those of the ranks.
    """

    def from_rank(self, rank: int, message: bytes) -> worker_pb2.CommandEvent:
        """Takes a message of a rank; returns it as the event for the callers. RuntimeError for a bug in the role."""

    def from_caller(self, request: Any) -> Mapping[int, bytes]:
        """Takes a message of a caller; returns the bytes for each rank that it concerns, which may be none.

        Raises:
            InvalidArgument: the message is impossible; nothing of it is taken.
        """


@dataclass(frozen=True)
class Messages:
    """The messages that a running command and its callers exchange.

    Attributes:
        method: the RPC by which callers send, in the service of the command. Its request has run_id, epoch and slot.
        response_type: what that RPC returns, empty, as soon as a message has been taken.
        are_exchanged: takes the request of a command call, and returns whether this call exchanges messages.
        open: makes the router of a command call on rank 0, from the call's request and the rows of each rank.
    """

    method: str
    response_type: type[Message]
    are_exchanged: Callable[[Any], bool]
    open: Callable[[Any, Sequence[Batch]], MessageRouter]


@dataclass(frozen=True)
class Command:
    """One RPC of a service that goes through the command queue and runs on all ranks of the group.

    Attributes:
        request_type: has `header`, and `slot` if the effect says that the command works on rows.
        run: called on every rank with its rows; without a slot, with None. A ValueError in it is a bug: mistakes of the
            caller are refused by `check` and `Rows.prepare`.
        rows: of a command that works on a slot.
        check: called on rank 0 before any rank is told; refuses a request by ValueError or any WireError.
        messages: None: callers cannot send it anything while it runs.
        service: the proto service that declares the RPC; None: the service in the file of the request.
    """

    method: str
    request_type: type[Message]
    effect: Effect
    run: Callable[[Any, Any, CommandProgress], Outcome]
    rows: Rows = field(default_factory=Rows)
    check: Callable[[Any], None] = lambda _: None
    messages: Messages | None = None
    service: ServiceDescriptor | None = None

    def __post_init__(self) -> None:
        if self.effect.has_rows != _has_slot(self.request_type):
            raise ValueError(f"{self.method} {self.effect.name}, and its request says otherwise by its field slot")

    @property
    def point(self) -> str:
        """The name of the failpoint that belongs to this command's method."""
        return failpoints.point_of(self.method)

    def place_of(self, request: Any) -> Place:
        """Returns the method and the step of a request, which every rank reports while it works on the request."""
        return Place(method=self.method, step=step_of(request))

    def num_parts_of(self, request: Any, rows: Batch | None) -> int:
        """Returns in how many parts the results of a request on these rows are sent on; 0 if it is not streamed."""
        num_parts = self.rows.num_parts(request) if rows is not None and "places" in rows else 0
        return num_parts if num_parts > 1 else 0

    def exchanges_messages(self, request: Any) -> bool:
        return self.messages is not None and self.messages.are_exchanged(request)


def step_of(request: Any) -> int:
    """Returns the training step of a command request: its slot's, its own or its version, else base_step."""
    fields = request.DESCRIPTOR.fields_by_name
    if "slot" in fields and request.HasField("slot"):
        return int(request.slot.step)
    named = next((name for name in ("step", "version") if name in fields), None)
    return int(getattr(request, named) if named else request.header.base_step)


def refused_command(
    method: str, request_type: type[Message], because: str, messages: Messages | None = None
) -> Command:
    """Makes a command that this group does not have: it answers INVALID_ARGUMENT with the reason."""

    def refuse(*_: Any) -> NoReturn:
        raise InvalidArgument(because)

    effect = Effect.WRITES_SLOT if _has_slot(request_type) else Effect.READS
    return Command(method, request_type, effect, refuse, check=refuse, messages=messages)


def _has_slot(request_type: type[Message]) -> bool:
    return "slot" in request_type.DESCRIPTOR.fields_by_name
