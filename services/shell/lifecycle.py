"""Commands that every role has: save, load, digest. They run through the mailbox like the role's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.shell.commands import Command, Outcome, Report, Role
from services.shell.ledger import Ledger
from services.shell.slots import SlotStore
from splitppo.rpc.errors import InvalidArgument, NotFound
from splitppo.v1 import worker_pb2

# After the last command, checkpoints that are still being written get this long.
DURABLE_TIMEOUT_S = 25.0


@dataclass(frozen=True)
class LifecycleCommand(Command):
    """A command of the shell itself. Its `run` gets, in place of rows, the bytes that rank 0's `attach` made.

    Attributes:
        check: rank 0, before anything is broadcast; refuses a request by raising.
        attach: rank 0; bytes that go to every rank.
    """

    check: Callable[[worker_pb2.LoadCheckpointRequest], None] | None = None
    attach: Callable[[], bytes] = bytes


def attachment_of(command: Command, attachment: bytes) -> bytes | None:
    """What a command without rows runs on: the bytes that came with the order, for a command of the shell itself."""
    return attachment if isinstance(command, LifecycleCommand) else None


class Lifecycle:
    """Checkpoints and digests of one rank's role; the ledger travels with the weights."""

    def __init__(self, role: Role, role_name: str, run_dir: Path, ledger: Ledger, slots: SlotStore) -> None:
        self._role = role
        self._role_name = role_name
        self._checkpoints = run_dir / "checkpoints"
        self._ledger = ledger
        self._slots = slots

    def commands(self) -> Sequence[LifecycleCommand]:
        """SaveCheckpoint, LoadCheckpoint and ComputeWeightsDigest."""
        return (
            LifecycleCommand(
                "SaveCheckpoint", worker_pb2.SaveCheckpointRequest, self._save, attach=self._ledger.serialise
            ),
            LifecycleCommand(
                "LoadCheckpoint", worker_pb2.LoadCheckpointRequest, self._load, check=self._check_load, repairs=True
            ),
            LifecycleCommand("ComputeWeightsDigest", worker_pb2.ComputeWeightsDigestRequest, self._digest),
        )

    def _directory(self, step: int) -> Path:
        return self._checkpoints / f"global_step_{step}" / self._role_name

    def _save(self, request: worker_pb2.SaveCheckpointRequest, state: Any, _: Report) -> Outcome:
        directory = self._directory(request.header.base_step)
        directory.mkdir(parents=True, exist_ok=True)
        durable = self._role.save_checkpoint(directory, state, with_hf_model=request.with_hf_model)
        return Outcome(durable=durable)

    def _check_load(self, request: worker_pb2.LoadCheckpointRequest) -> None:
        if request.step < 0:
            raise InvalidArgument(f"step must be 0 or more, got {request.step}")
        if request.step:
            directory = self._directory(request.step)
            if not directory.is_dir():
                raise NotFound(f"there is no checkpoint {directory}")
            self._role.check_checkpoint(directory)

    def _load(self, request: worker_pb2.LoadCheckpointRequest, _: Any, __: Report) -> Outcome:
        state = self._role.load_checkpoint(self._directory(request.step) if request.step else None)
        self._ledger.restore(state if request.step else b"", request.step)
        self._slots.clear()
        return Outcome()

    def _digest(self, _: worker_pb2.ComputeWeightsDigestRequest, __: Any, ___: Report) -> Outcome:
        return Outcome(weights_sha256=self._role.compute_weights_digest())
