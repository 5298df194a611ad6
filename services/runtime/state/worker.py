"""Defines the state that rank 0's main thread (runs commands) and its gRPC thread (answers calls) share."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.runtime.command import Command, Effect
from services.runtime.context import RankContext
from services.runtime.state.batch_store import BatchStore
from services.runtime.state.command_call import CommandCall, StoredReply
from services.runtime.state.command_queue import CommandQueue, draining
from services.runtime.state.fencing import FencingToken
from services.runtime.state.ledger import Ledger
from splitppo.config.worker_digest import worker_digest
from splitppo.rpc.errors import Dirty, WireError
from splitppo.run_folder.epoch import EPOCH_FILE
from splitppo.v1 import worker_pb2


@dataclass
class Worker:
    """One service on rank 0: its role, its controller, its batches, its command queue, and whether it can serve.

    Attributes:
        commands: the table of commands.
        ledger: of the updates, or of the version of published weights that the group holds. None if the group has
            neither; then no step is committed, and requests may name any step.
        instance_id: new at each start of the group.
        reads_images: rows may have images, which the ranks decode.
        has_failed: the group ends because of a failure.
        on_change: a function that is called, in any thread, when `is_serving` may have changed.
    """

    context: RankContext
    role: worker_pb2.Role
    num_parameters: int
    processes: Sequence[worker_pb2.Process]
    ledger: Ledger | None
    slots: BatchStore
    commands: Sequence[Command] = ()
    num_trainable_parameters: int = 0
    reads_images: bool = False

    def __post_init__(self) -> None:
        config = self.context.config
        self.instance_id = uuid.uuid4().hex
        self.config_digest = worker_digest(config, self.context.role_name)
        self.fencing = FencingToken(config.run.dir / EPOCH_FILE)
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
        """True if the service takes commands of every kind: it is not failed, dirty or draining."""
        return not (self.has_failed or self._dirty or self._is_draining)

    @property
    def committed_step(self) -> int | None:
        """The step whose weights the group has; -1 if it waits for its first ones, None for a role without a step."""
        return None if self.ledger is None else self.ledger.committed_step

    def stored_reply(self, call: CommandCall) -> worker_pb2.CommandResult | None:
        """Returns the stored reply if the same command request was answered before; else None.

        Raises:
            InvalidArgument: the request id belongs to another request.
        """
        if (stored := self._stored(call)) is None:
            return None
        call.check_same(stored.request_sha256)
        return stored.reply

    def _stored(self, call: CommandCall) -> StoredReply | None:
        """Returns the reply stored for a call's request id where its `Effect` says it is; None without such a reply.

        A load is not answered from the ledger while the weights are in an unknown state: it must run again.
        """
        effect = call.command.effect
        if effect is Effect.WRITES_SLOT:
            return self.slots.reply_of(call.request.slot, call.reply_key)
        if self.ledger is None:
            return None
        if effect is Effect.SAVES:
            return self.ledger.reply_of_save(call.request_id)
        is_lost = effect is Effect.LOADS and bool(self._dirty)  # the weights that it loaded
        return self.ledger.reply_of(call.request_id) if effect.sets_step and not is_lost else None

    @property
    def loading_method(self) -> str:
        """The name of the command that loads weights; empty if the group has none."""
        return next((command.method for command in self.commands if command.effect is Effect.LOADS), "")

    def check_clean(self) -> None:
        """Raises Dirty if the weights belong to no step because an update or a load failed half-way."""
        if self._dirty:
            answered = f"GetStatus and {self.loading_method}"
            raise Dirty(f"{self._dirty}; only {answered} are answered until weights are loaded")

    def check_open(self) -> None:
        """Raises Unavailable once the service is draining: it finishes its running command and ends."""
        if self._is_draining:
            raise draining()

    def mark_dirty(self, because: str) -> None:
        """Notes that the weights belong to no step any more; most commands are refused until a checkpoint is loaded."""
        self._dirty = because
        self.on_change()

    def mark_clean(self) -> None:
        """Notes that a checkpoint was loaded, so the weights belong to a step again."""
        self._dirty = ""
        self.on_change()

    def drain(self) -> None:
        """Refuses all calls but the running one, which is finished or cancelled; the main thread then ends its loop."""
        self._is_draining = True
        self.on_change()
        self.command_queue.close(draining())
        self.command_queue.cancel_running("the service is draining")

    def mark_failed(self, error: WireError) -> None:
        """Notes that the group ends because of an error, and answers all open calls with that error."""
        self.has_failed = True
        self.on_change()
        self.command_queue.close(error)
        self.command_queue.fail_open(error)
