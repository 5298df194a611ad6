"""Defines the commands of every role that trains: save or load a checkpoint, compute the weights' sha256.

The last file of a checkpoint is its manifest. Rank 0 writes it when the files of all ranks are there, and before a load
compares every file with it. No content of a file is used before that.
"""

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from services.runtime.command import Command, CommandProgress, Effect, Outcome, refused_command
from services.runtime.context import RankContext
from services.runtime.role import CheckpointedRole
from services.runtime.state.ledger import Ledger
from splitppo import failpoints
from splitppo.config.section import RoleName
from splitppo.config_error import sentence_of
from splitppo.manifest import Manifest, describe_files, read_manifest, verify_files, write_manifest
from splitppo.rpc.errors import DataLoss, InvalidArgument, NotFound, StorageFailed
from splitppo.v1 import worker_pb2

# After the last command the group waits this long for checkpoints that are still being written.
DURABLE_TIMEOUT_S = 25.0


class CheckpointCommands:
    """Saves, loads and digests one rank's share of a trained role; the service's ledger is saved with the weights."""

    def __init__(self, role: CheckpointedRole, context: RankContext, ledger: Ledger) -> None:
        self._role = role
        self._role_name = context.role_name
        self._rank = context.rank
        self._checkpoints = context.config.run.dir / "checkpoints"
        self._ledger = ledger
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manifest")

    def commands(self) -> Sequence[Command]:
        """Returns the commands SaveCheckpoint, LoadCheckpoint and ComputeWeightsDigest, bound to this role."""
        save = worker_pb2.SaveCheckpointRequest
        load = worker_pb2.LoadCheckpointRequest
        digest = worker_pb2.ComputeWeightsDigestRequest
        return (
            Command("SaveCheckpoint", save, Effect.SAVES, self._save, check=self._check_save),
            Command("LoadCheckpoint", load, Effect.LOADS, self._load, check=self._check_load),
            Command("ComputeWeightsDigest", digest, Effect.READS, self._digest),
        )

    def _directory(self, step: int) -> Path:
        return self._checkpoints / f"global_step_{step}" / self._role_name

    def _check_save(self, request: worker_pb2.SaveCheckpointRequest) -> None:
        """Raises StorageFailed if the checkpoint's folder cannot be written, before any rank begins to save."""
        directory = self._directory(request.header.base_step)
        probe = directory / f".probe-{secrets.token_hex(4)}"
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(bytes(1))
            probe.unlink()

    def _save(self, request: worker_pb2.SaveCheckpointRequest, _: None, __: CommandProgress) -> Outcome:
        """Saves this rank's share and returns while it is still being written; `durable` says when it is on disk.

        On rank 0 this is after the manifest (`_describe`), which the files of all ranks precede; its result is the
        manifest's sha256.
        """
        step = request.header.base_step
        ledger = self._ledger.serialise()
        directory = self._directory(step)
        saved = self._role.save_checkpoint(directory, ledger, with_hf_model=request.with_hf_model)
        durable: Future[str] = saved if self._rank else Future()
        # The first of its callbacks: the reply comes after it.
        durable.add_done_callback(lambda _: failpoints.hit("save_checkpoint.durable", step))
        if self._rank == 0:
            describe = partial(self._describe, directory, step, ledger, durable)
            saved.add_done_callback(lambda done: self._thread.submit(describe, done))
        return Outcome(durable=durable)

    def _describe(self, directory: Path, step: int, ledger: bytes, durable: Future[str], saved: Future[str]) -> None:
        """Writes a checkpoint's manifest after all ranks' files; `durable` gets the manifest's sha256 or the error."""
        try:
            with storage_errors(directory):
                weights_sha256 = saved.result()
                files = describe_files(directory)
                ledger_sha256 = hashlib.sha256(ledger).hexdigest()
                manifest = Manifest(self._role_name, step, self._role.model, files, weights_sha256, ledger_sha256)
                manifest_sha256 = write_manifest(directory, manifest)
        except BaseException as error:  # noqa: BLE001 - the future hands it on
            durable.set_exception(error)
        else:
            durable.set_result(manifest_sha256)

    def _check_load(self, request: worker_pb2.LoadCheckpointRequest) -> None:
        """Checks the files of the checkpoint to load against its manifest; the initial model (step 0) has no files."""
        step = request.step
        if step < 0:
            raise InvalidArgument(f"step must be 0 or more, got {step}")
        if step == 0:
            return
        directory = self._directory(step)
        if not directory.is_dir():
            raise NotFound(f"there is no checkpoint {directory}")
        with storage_errors(directory):
            manifest = read_manifest(directory)
            if (manifest.role, manifest.step) != (self._role_name, step):
                raise InvalidArgument(
                    f"{directory} holds the {manifest.role} of step {manifest.step}, expected the"
                    f" {self._role_name} of step {step}"
                )
            if manifest.model != self._role.model:
                raise InvalidArgument(f"{directory} holds {manifest.model}, expected {self._role.model}")
            verify_files(directory, manifest)
            self._role.check_checkpoint(directory)

    def _load(self, request: worker_pb2.LoadCheckpointRequest, _: None, progress: CommandProgress) -> Outcome:
        """Loads a checkpoint on every rank; returns the weights' sha256, to be compared with that in the manifest.

        Step 0 is the model of the folder, without checkpoint and ledger.

        Raises:
            DataLoss: the ledger in the checkpoint is another one than the manifest's.
        """
        directory = self._directory(request.step) if request.step else None
        ledger = self._role.load_checkpoint(directory, progress)
        if directory and hashlib.sha256(ledger).hexdigest() != read_manifest(directory).ledger_sha256:
            raise DataLoss(f"the ledger in {directory} is not the one that its manifest names")
        if directory is None:
            return Outcome(saved_ledger=b"")
        return Outcome(weights_sha256=self._role.compute_weights_digest(), saved_ledger=ledger)

    def _digest(self, _: worker_pb2.ComputeWeightsDigestRequest, __: Any, ___: CommandProgress) -> Outcome:
        return Outcome(weights_sha256=self._role.compute_weights_digest())


def no_checkpoint_commands(role_name: RoleName) -> Sequence[Command]:
    """Returns the checkpoint commands of a role that does not train: each of them raises InvalidArgument."""
    because = f"the {role_name} group trains nothing: it has no checkpoints and no digest"
    return (
        refused_command("SaveCheckpoint", worker_pb2.SaveCheckpointRequest, because),
        refused_command("LoadCheckpoint", worker_pb2.LoadCheckpointRequest, because),
        refused_command("ComputeWeightsDigest", worker_pb2.ComputeWeightsDigestRequest, because),
    )


@contextmanager
def storage_errors(directory: Path) -> Iterator[None]:
    """Turns an OSError in the `with` block into StorageFailed, a sentence that names the file, or else `directory`."""
    try:
        yield
    except OSError as error:
        where = f"{error.strerror}: {error.filename2 or error.filename or directory}"
        raise StorageFailed(sentence_of(error) if error.strerror is None else where) from error
