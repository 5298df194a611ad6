"""The state that rank 0's two threads share: the main thread that works and the gRPC thread that answers."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.runtime.context import RankContext
from services.runtime.state.batch_store import BatchStore
from services.runtime.state.command_call import CommandCall, StoredReply
from services.runtime.state.command_queue import CommandQueue, draining
from services.runtime.state.fencing import FencingToken
from services.runtime.state.ledger import Ledger
from splitppo.config.worker_digest import worker_digest
from splitppo.rpc.errors import Dirty, WireError
from splitppo.v1 import worker_pb2


@dataclass
class Worker:
    """A service as its callers see it: who it is, whose it is, what it holds, and in which state it is.

    Attributes:
        ledger: None where nothing is trained: then no step is committed, and requests alone say which one they mean.
        instance_id: new at each start of the group.
        has_failed: the group ends because of a failure.
        on_change: called, in any thread, when `is_serving` may have changed.
    """

    context: RankContext
    role: worker_pb2.Role
    num_parameters: int
    processes: Sequence[worker_pb2.Process]
    ledger: Ledger | None
    slots: BatchStore

    def __post_init__(self) -> None:
        config = self.context.config
        self.instance_id = uuid.uuid4().hex
        self.config_digest = worker_digest(config, self.context.role_name)
        self.fencing = FencingToken(config.run.dir / "controller.epoch")
        self.command_queue = CommandQueue(config.services.max_queued_commands)
        self.on_change: Callable[[], object] = lambda: None
        self._is_draining = False
        self._dirty = ""
        self.has_failed = False

    @property
    def state(self) -> worker_pb2.WorkerState:
        if self.has_failed:
            return worker_pb2.WORKER_STATE_FAILED
        if self._dirty:
            return worker_pb2.WORKER_STATE_DIRTY
        if self._is_draining:
            return worker_pb2.WORKER_STATE_DRAINING
        return worker_pb2.WORKER_STATE_BUSY if self.command_queue.running else worker_pb2.WORKER_STATE_IDLE

    @property
    def is_serving(self) -> bool:
        """True if it takes commands of every kind."""
        return not (self.has_failed or self._dirty or self._is_draining)

    @property
    def committed_step(self) -> int | None:
        """None without a ledger."""
        return None if self.ledger is None else self.ledger.committed_step

    def stored_reply(self, call: CommandCall) -> worker_pb2.CommandResult | None:
        """The reply of a command that was finished before and still stands; InvalidArgument if it was another one."""
        if (stored := self._stored(call)) is None:
            return None
        call.check_same(stored.request_sha256)
        return stored.reply

    def _stored(self, call: CommandCall) -> StoredReply | None:
        """Returns what is stored under the call's request id; each kind of command has its own home."""
        if call.command.works_on_slot and not call.command.commits:
            return self.slots.reply_of(call.request.slot, call.reply_key)
        if self.ledger is None:
            return None
        if call.command.commits:
            return self.ledger.reply_of(call.request_id)
        return self.ledger.reply_of_save(call.request_id) if call.command.method == "SaveCheckpoint" else None

    def check_clean(self) -> None:
        """Raises Dirty after an update that failed half-way."""
        if self._dirty:
            raise Dirty(f"{self._dirty}; only GetStatus and LoadCheckpoint are answered until a checkpoint is loaded")

    def check_open(self) -> None:
        """Raises Unavailable once the service is draining."""
        if self._is_draining:
            raise draining()

    def mark_dirty(self, because: str) -> None:
        """The weights belong to no step any more."""
        self._dirty = because
        self.on_change()

    def mark_clean(self) -> None:
        """A checkpoint was loaded."""
        self._dirty = ""
        self.on_change()

    def drain(self) -> None:
        """Finishes what runs, or cancels it where it can, and refuses all else; then the main thread leaves."""
        self._is_draining = True
        self.on_change()
        self.command_queue.close(draining())
        self.command_queue.cancel_running("the service is draining")

    def mark_failed(self, error: WireError) -> None:
        """The group ends: everybody who waits is told why."""
        self.has_failed = True
        self.on_change()
        self.command_queue.close(error)
        self.command_queue.fail_open(error)
