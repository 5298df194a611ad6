"""Commands that every role has: save, load, digest. They run through the mailbox like the role's own.

A part of a checkpoint ends with its manifest: rank 0 writes it when the files of all ranks are there, and before a load
compares every file with it. Nothing of a file is read for its meaning before that.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.shell.commands import Command, Outcome, Report, Role
from services.shell.context import RankContext
from services.shell.ledger import Ledger
from services.shell.slots import SlotStore
from splitppo import failpoints
from splitppo.manifest import (
    DamagedCheckpoint,
    Manifest,
    describe_files,
    read_manifest,
    verify_files,
    write_manifest,
)
from splitppo.rpc.errors import DataLoss, InvalidArgument, NotFound, StorageFailed
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

    check: Callable[[Any], None] | None = None
    attach: Callable[[], bytes] = bytes


def attachment_of(command: Command, attachment: bytes) -> bytes | None:
    """What a command without rows runs on: the bytes that came with the order, for a command of the shell itself."""
    return attachment if isinstance(command, LifecycleCommand) else None


class Lifecycle:
    """Checkpoints and digests of one rank's role; the ledger travels with the weights."""

    def __init__(self, role: Role, context: RankContext, ledger: Ledger, slots: SlotStore) -> None:
        self._role = role
        self._role_name = context.role_name
        self._rank = context.rank
        self._checkpoints = context.config.run.dir / "checkpoints"
        self._ledger = ledger
        self._slots = slots
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manifest")

    def commands(self) -> Sequence[LifecycleCommand]:
        """SaveCheckpoint, LoadCheckpoint and ComputeWeightsDigest."""
        return (
            LifecycleCommand(
                "SaveCheckpoint",
                worker_pb2.SaveCheckpointRequest,
                self._save,
                check=self._check_save,
                attach=self._ledger.serialise,
            ),
            LifecycleCommand(
                "LoadCheckpoint", worker_pb2.LoadCheckpointRequest, self._load, check=self._check_load, repairs=True
            ),
            LifecycleCommand("ComputeWeightsDigest", worker_pb2.ComputeWeightsDigestRequest, self._digest),
        )

    def _directory(self, step: int) -> Path:
        return self._checkpoints / f"global_step_{step}" / self._role_name

    def _check_save(self, request: worker_pb2.SaveCheckpointRequest) -> None:
        """A folder that cannot be written is refused while that costs no more than this command."""
        directory = self._directory(request.header.base_step)
        probe = directory / f".probe-{secrets.token_hex(4)}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(bytes(1))
            probe.unlink()
        except OSError as error:
            raise _storage_failed(error, directory) from error

    def _save(self, request: worker_pb2.SaveCheckpointRequest, state: Any, _: Report) -> Outcome:
        step = request.header.base_step
        directory = self._directory(step)
        saved = self._role.save_checkpoint(directory, state, with_hf_model=request.with_hf_model)
        if self._rank != 0:
            saved.add_done_callback(lambda _: failpoints.hit("save_checkpoint.durable", step))
            return Outcome(durable=saved)
        described: Future[str] = Future()
        # The first of its callbacks: the reply comes after it.
        described.add_done_callback(lambda _: failpoints.hit("save_checkpoint.durable", step))

        def describe(saved: Future[str]) -> None:
            writing = self._thread.submit(self._write_manifest, directory, step, saved, state)
            writing.add_done_callback(lambda written: _pass_on(written, described))

        saved.add_done_callback(describe)
        return Outcome(durable=described)

    def _write_manifest(self, directory: Path, step: int, saved: Future[str], state: bytes) -> str:
        """Describes the files of all ranks, when they are there; returns the manifest's sha256."""
        try:
            weights_sha256 = saved.result()
            files = describe_files(directory)
            ledger_sha256 = hashlib.sha256(state).hexdigest()
            manifest = Manifest(self._role_name, step, self._role.model, files, weights_sha256, ledger_sha256)
            return write_manifest(directory, manifest)
        except OSError as error:
            raise _storage_failed(error, directory) from error

    def _check_load(self, request: worker_pb2.LoadCheckpointRequest) -> None:
        if request.step < 0:
            raise InvalidArgument(f"step must be 0 or more, got {request.step}")
        if request.step:
            directory = self._directory(request.step)
            if not directory.is_dir():
                raise NotFound(f"there is no checkpoint {directory}")
            try:
                self._check_files(directory, request.step)
                self._role.check_checkpoint(directory)
            except DamagedCheckpoint as error:
                raise DataLoss(str(error)) from error
            except OSError as error:
                raise _storage_failed(error, directory) from error

    def _check_files(self, directory: Path, step: int) -> None:
        """Compares every file with the manifest.

        Raises:
            DamagedCheckpoint: one is not as it was written.
            InvalidArgument: it is the part of another role, of another step, or of another model.
        """
        manifest = read_manifest(directory)
        if (manifest.role, manifest.step) != (self._role_name, step):
            raise InvalidArgument(
                f"{directory} holds the {manifest.role} of step {manifest.step}, expected the {self._role_name} of"
                f" step {step}"
            )
        if manifest.model != self._role.model:
            raise InvalidArgument(f"{directory} holds {manifest.model}, expected {self._role.model}")
        verify_files(directory, manifest)

    def _load(self, request: worker_pb2.LoadCheckpointRequest, _: Any, __: Report) -> Outcome:
        """Every rank; answers what the weights are now, which the controller compares with the manifest."""
        if request.step == 0:
            self._role.load_checkpoint(None)
            self._ledger.restore(b"", 0)
            self._slots.clear()
            return Outcome()
        directory = self._directory(request.step)
        state = self._role.load_checkpoint(directory)
        if hashlib.sha256(state).hexdigest() != read_manifest(directory).ledger_sha256:
            raise DataLoss(f"the ledger in {directory} is not the one that its manifest names")
        self._ledger.restore(state, request.step)
        self._slots.clear()
        return Outcome(weights_sha256=self._role.compute_weights_digest())

    def _digest(self, _: worker_pb2.ComputeWeightsDigestRequest, __: Any, ___: Report) -> Outcome:
        return Outcome(weights_sha256=self._role.compute_weights_digest())


def _pass_on(done: Future[str], to: Future[str]) -> None:
    """Resolves a future as another one was."""
    error = done.exception()
    if error is None:
        to.set_result(done.result())
    else:
        to.set_exception(error)


def _storage_failed(error: OSError, directory: Path) -> StorageFailed:
    """One sentence that names the file, or at least the folder."""
    if error.strerror is None:
        return StorageFailed(str(error))
    return StorageFailed(f"{error.strerror}: {error.filename2 or error.filename or directory}")
