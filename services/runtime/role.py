"""The interface between the runtime of a worker group and a role (actor, critic, reward, rollout): commands, methods.

The runtime moves rows of batches and orders work; it knows nothing of PPO. A role declares its commands;
the runtime serves each as the RPC of the same name. A role that trains has checkpoints as well.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from numpy.typing import NDArray

from splitppo import failpoints
from splitppo.batch import Batch
from splitppo.rpc.errors import InvalidArgument, Place
from splitppo.rpc.wire_format import divide
from splitppo.v1 import worker_pb2
from splitppo.v1.conversation_pb2 import Turn, TurnReply, TurnsEnded

# The most bytes of an event with turns, far below the limit of a message.
_MAX_EVENT_BYTES = 1 << 20

# The replies for one rank; None is the end mark.
ReplyQueue = SimpleQueue[Sequence[TurnReply] | None]


@dataclass(frozen=True)
class ReplyLimits:
    """The limits by which rank 0 checks replies to a command's turns when they arrive.

    Attributes:
        num_token_ids: token ids are 0 to num_token_ids - 1.
        max_response_length: the most tokens of a response, replies included.
    """

    num_token_ids: int
    max_response_length: int


@dataclass
class CommandProgress:
    """Reports the progress and finished parts of one running command on one rank, and tells if it was cancelled.

    Attributes:
        point: the name of the command as a failpoint.
        on_progress: functions that are called with done, total and phase.
        on_part: called with the number of a part, this rank's rows of the part, and the version of the weights.
        is_cancelled: returns True once nobody needs the command any more: a cancellable command then raises
            CommandCancelled. Ranks learn it at different times, up to half a second apart, and some may have finished
            before. So no rank may wait for another one between the first call and the end of the command.
        announce: called with turns of this rank's conversations that have ended, if the command takes replies.
        replies: the replies to these turns that have arrived; None if the command takes none.
    """

    point: str
    on_progress: Sequence[Callable[[int, int, str], None]]
    on_part: Callable[[int, Batch, int], None]
    is_cancelled: Callable[[], bool]
    announce: Callable[[TurnsEnded], None] = lambda _: None
    replies: ReplyQueue | None = None

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

    def turns_ended(self, turns: Sequence[Turn]) -> None:
        """Reports turns of this rank's conversations that have ended, in a command that takes replies."""
        if self.replies is None:
            raise RuntimeError("turns were reported, but the command takes no replies")
        for some in divide(turns, _MAX_EVENT_BYTES):
            self.announce(TurnsEnded(turns=some))
        for _ in turns:
            failpoints.hit(f"{self.point}.turn")

    def take_replies(self, timeout_s: float) -> Sequence[TurnReply]:
        """Takes the replies to this rank's turns that have arrived since the last call.

        If there are none, it waits for the first one, at most for this time.
        """
        if self.replies is None:
            raise RuntimeError("replies were asked for, but the command takes none")
        taken: list[TurnReply] = []
        with suppress(Empty):
            taken += self.replies.get(timeout=timeout_s) or ()
            while True:
                taken += self.replies.get_nowait() or ()
        for _ in taken:
            failpoints.hit(f"{self.point}.reply")
        return taken


class CommandCancelled(Exception):
    """A rank has stopped a cancelled command early; the rank's state is as before it, and the group goes on."""


@dataclass(frozen=True)
class Outcome:
    """The results of one command on one rank; the command's function returns an Outcome on every rank.

    Attributes:
        columns: new columns for this rank's rows, in the order received; the runtime gathers them into the slot.
            A command that expands rows (Generate) returns a multiple of its rows, grouped by input row. Those of an
            update replace the rows of its slot, until the next step is committed.
        metrics: already reduced over ranks.
        weights_sha256: answer of ComputeWeightsDigest and LoadCheckpoint.
        policy_version: the committed step whose weights made the columns (Generate).
        durable: resolves when all ranks are done, on rank 0 with the sha256 of the manifest (SaveCheckpoint,
            PublishWeights). The reply waits for rank 0's, the commands after it do not.
    """

    columns: Batch | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    weights_sha256: str = ""
    policy_version: int = 0
    durable: Future[str] | None = None


def step_of(request: Any) -> int:
    """Returns the training step of a command request: its slot's, its own or its version, else base_step."""
    fields = request.DESCRIPTOR.fields_by_name
    if "slot" in fields and request.HasField("slot"):
        return int(request.slot.step)
    named = next((name for name in ("step", "version") if name in fields), None)
    return int(getattr(request, named) if named else request.header.base_step)


@dataclass(frozen=True)
class Command:
    """One RPC of a service that goes through the command queue and runs on all ranks of the group.

    Attributes:
        request_type: has `header` and, where it works on rows, `slot`.
        run: called on every rank with its rows; without a slot, with None. A ValueError in it is a
            bug: mistakes of the caller are refused by `check` and `prepare`.
        columns: without them in the slot the call is refused (FAILED_PRECONDITION).
        optional_columns: passed on if the slot has them.
        check: called on rank 0 before anything is broadcast; refuses a request by ValueError or any WireError.
        prepare: called on rank 0 after `check`; refuses rows in the same way, may add columns or drop rows. The column
            `places` (which rows of the whole a row becomes) lets parts of the command be sent on while others are
            still being computed, and its conversations take replies.
        num_parts: takes the request and returns the number of parts; the command is streamed if it is 2 or more, and
            the rows have the column `places`.
        reply_limits: takes the request of a command whose conversations take replies, and returns the limits of the
            replies; None for any other request. The rows must have the column `places`.
        shard: (batch, num_ranks) -> num_ranks index arrays that contain every row once; default
            sharding.shard_by_tokens; for updates there is sharding.shard_by_mini_batch.
        commits: it is an Update, which requires step == committed + 1 and commits it.
        cancellable: it changes nothing but the slot, and calls `CommandProgress.is_cancelled`.
        repairs: it brings the service to a known state, whatever was before (LoadCheckpoint); calls that wait are
            refused for it, and a running one is cancelled if it can be.
        syncs: it makes the service hold the weights of the step `request.version`, which becomes the committed step
            (SyncWeights).
        service: the proto service that declares the RPC; None: the service in the file of the request.
    """

    method: str
    request_type: type[Message]
    run: Callable[[Any, Any, CommandProgress], Outcome]
    columns: Sequence[str] = ()
    optional_columns: Sequence[str] = ()
    check: Callable[[Any], None] = lambda _: None
    prepare: Callable[[Any, Batch], Batch] = lambda _, rows: rows
    num_parts: Callable[[Any], int] = lambda _: 0
    reply_limits: Callable[[Any], ReplyLimits | None] = lambda _: None
    shard: Callable[[Batch, int], Sequence[NDArray[np.int64]]] | None = None
    commits: bool = False
    cancellable: bool = False
    repairs: bool = False
    syncs: bool = False
    service: ServiceDescriptor | None = None

    @property
    def works_on_slot(self) -> bool:
        return "slot" in self.request_type.DESCRIPTOR.fields_by_name

    @property
    def sets_step(self) -> bool:
        """True if the command changes the committed step."""
        return self.commits or self.syncs

    @property
    def point(self) -> str:
        """The name of the failpoint that belongs to this command's method."""
        return failpoints.point_of(self.method)

    def place_of(self, request: Any) -> Place:
        """Returns the method and the step of a request, which every rank reports while it works on the request."""
        return Place(method=self.method, step=step_of(request))


def refused_command(method: str, request_type: type[Message], because: str) -> Command:
    """Makes a command that this group does not have: it answers INVALID_ARGUMENT with the reason."""

    def refuse(*_: Any) -> NoReturn:
        raise InvalidArgument(because)

    return Command(method, request_type, refuse, check=refuse)


class Role(Protocol):
    """The work of a worker group (actor, critic, reward, rollout), as methods that each rank's main thread calls."""

    role: worker_pb2.Role
    num_parameters: int

    def commands(self) -> Sequence[Command]:
        """Returns the RPCs that this role adds to those of the runtime, as `Command`s."""


@runtime_checkable
class CheckpointedRole(Role, Protocol):
    """A role that trains a model; a checkpoint has the model and the ledger of the role's service."""

    model: str  # its architecture in words; a checkpoint of another one is refused

    def save_checkpoint(self, directory: Path, service_state: bytes, *, with_hf_model: bool) -> Future[str]:
        """Writes the role as it is now to `directory` in the background, together with rank 0's `service_state`.

        The future resolves when the files of all ranks are written, on rank 0 with the sha256 of the weights in them
        (as `compute_weights_digest`), or to the OSError of a storage that has failed.
        """

    def check_checkpoint(self, directory: Path) -> None:
        """Raises DamagedCheckpoint if files are missing or torn, ValueError for another model; for rank 0 alone."""

    def load_checkpoint(self, directory: Path | None, progress: Callable[[int, int, str], None]) -> bytes:
        """Loads the checkpoint in `directory` (None: the initial model); returns the saved service state (None: empty).

        `progress` is called while a save that is still being written has to be waited for.

        Raises:
            ValueError, OSError: `directory` has no checkpoint of this role, or a torn one.
        """

    def compute_weights_digest(self) -> str:
        """Returns the sha256 of the weights: sorted named_parameters, little-endian fp32 values; tied weights once."""
