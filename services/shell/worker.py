"""What rank 0's two threads share: the main thread that works and the gRPC thread that answers."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence

from services.shell.bounds import ByteLimit
from services.shell.claim import Claim
from services.shell.context import RankContext
from services.shell.ledger import Ledger
from services.shell.mailbox import Mailbox, draining
from services.shell.slots import SlotStore
from splitppo.config.digest import worker_digest
from splitppo.rpc.errors import Dirty, WireError
from splitppo.v1 import worker_pb2


class Worker:
    """A service as its callers see it: who it is, whose it is, what it holds, and in which state it is.

    Attributes:
        instance_id: new at each start of the group.
        config_digest: of the sections of the configuration that shape this role.
        processes: all ranks.
    """

    def __init__(
        self,
        context: RankContext,
        role: worker_pb2.Role,
        num_parameters: int,
        processes: Sequence[worker_pb2.Process],
        ledger: Ledger,
        slots: SlotStore,
    ) -> None:
        self.context = context
        self.role = role
        self.num_parameters = num_parameters
        self.processes = processes
        self.instance_id = uuid.uuid4().hex
        self.config_digest = worker_digest(context.config, context.role_name)
        self.claim = Claim(context.config.run.dir / "controller.epoch")
        self.mailbox = Mailbox(context.config.services.max_queued_commands)
        self.ledger = ledger
        self.slots = slots
        self.room = ByteLimit(context.config.services.max_held_bytes, lambda: slots.held_bytes)
        self._lock = threading.Lock()
        self._is_draining = False
        self._dirty = ""
        self._failed = ""
        self._on_change: Callable[[], None] = lambda: None
        self._last_save = ("", worker_pb2.CommandResult())

    def remember_save(self, request_id: str, reply: worker_pb2.CommandResult) -> None:
        """A checkpoint is durable; a repeated request for it gets the same reply, whatever was committed since."""
        self._last_save = (request_id, reply)

    def reply_of_save(self, request_id: str) -> worker_pb2.CommandResult | None:
        """The reply of the last durable checkpoint, if this request made it."""
        saved_id, reply = self._last_save
        return reply if request_id == saved_id else None

    @property
    def state(self) -> worker_pb2.WorkerState:
        if self._failed:
            return worker_pb2.WORKER_STATE_FAILED
        if self._dirty:
            return worker_pb2.WORKER_STATE_DIRTY
        if self._is_draining:
            return worker_pb2.WORKER_STATE_DRAINING
        return worker_pb2.WORKER_STATE_BUSY if self.mailbox.running else worker_pb2.WORKER_STATE_IDLE

    @property
    def is_serving(self) -> bool:
        """Whether it takes commands of every kind."""
        return self.state in (worker_pb2.WORKER_STATE_IDLE, worker_pb2.WORKER_STATE_BUSY)

    def on_change(self, callback: Callable[[], None]) -> None:
        """`callback` is called, in any thread, when `is_serving` may have changed."""
        self._on_change = callback

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
        self._set("_dirty", because)

    def mark_clean(self) -> None:
        """A checkpoint was loaded: what is saved from here on is another checkpoint, also of a step saved before."""
        self._last_save = ("", worker_pb2.CommandResult())
        self._set("_dirty", "")

    def drain(self) -> None:
        """What runs is finished, or cancelled where it can be, all else is refused; then the main thread leaves."""
        self._set("_is_draining", True)
        self.mailbox.close(draining())
        self.mailbox.cancel_running("the service is draining")

    def mark_failed(self, error: WireError) -> None:
        """The group ends: everybody who waits is told why."""
        self._set("_failed", str(error))
        self.mailbox.close(error)
        self.mailbox.fail_open(error)

    def _set(self, name: str, value: object) -> None:
        with self._lock:
            setattr(self, name, value)
        self._on_change()
