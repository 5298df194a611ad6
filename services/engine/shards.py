"""Writes and reads the files of a checkpoint, in the format of torch.distributed.checkpoint.

Tensors are written and read one after the other: of a model that is saved, at most one tensor is in memory twice.
"""

import errno
import os
import shutil
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from services.engine.rest import values_at_rest
from splitppo.config_error import sentence_of
from splitppo.file_lock import any_lock
from splitppo.manifest import DamagedCheckpoint
from splitppo.plain_file import errors_named

_LITTLE_BYTES = 1 << 20  # less free space counts as a full disk
_MODEL = "model."  # the prefix of the model's weights in a checkpoint


class ShardWriter(FileSystemWriter):
    """Writes this rank's tensors of a checkpoint to one file; each GPU tensor is copied just before it is written.

    torch's own writer keeps a copy of every tensor that is on a GPU, or is a view, until the file is complete. The file
    is written with the lock of one of the files `locks`, if there are any. Tensors with a storage in `at_rest` are read
    from there, see `Rest.copies`.

    Attributes:
        num_written: number of tensors written so far, of `num_tensors`.
        is_writing: True while this rank writes its file, and does not wait for other ranks.
        is_done: set when the tensors of all ranks are written, also after an error.
    """

    def __init__(self, directory: Path, locks: Sequence[Path], at_rest: Mapping[UntypedStorage, Tensor]) -> None:
        super().__init__(directory)
        self.num_written = 0
        self.num_tensors = 0
        self.is_writing = False
        self.is_done = threading.Event()
        self._locks = locks
        self._at_rest = at_rest

    def write(self, state: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
        """Writes this rank's part of the tensors in `state`; all ranks of the group (None: one rank) call it.

        Raises:
            OSError: storage has failed.
        """
        try:
            with _storage_errors():
                state_dict_saver.save(state, storage_writer=self, process_group=group, no_dist=group is None)
        finally:
            self.is_done.set()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Writes this rank's tensors of a save plan to one file; torch.distributed.checkpoint calls it."""
        name = f"{plan.storage_data.prefix}0.distcp"
        results = []
        self.num_tensors = len(plan.items)
        path = Path(self.path) / name
        with any_lock(self._locks), self._writing(), errors_named(path), path.open("wb") as file:
            for item in plan.items:
                begin = file.tell()
                tensor = _alone(planner.resolve_data(item), self._at_rest)
                with _write_errors(path):
                    torch.save(tensor, file)
                written = _StorageInfo(name, begin, file.tell() - begin)
                results.append(WriteResult(item.index, written.length, written))
                self.num_written += 1
            file.flush()
            os.fsync(file.fileno())
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self.is_writing = True
        try:
            yield
        finally:
            self.is_writing = False


@contextmanager
def _write_errors(file: Path) -> Iterator[None]:
    """Turns a RuntimeError of torch.save into an OSError that names the file, its cause and the free space.

    On a full disk torch's zip writer may say only that it is at an unexpected position.
    """
    try:
        yield
    except RuntimeError as error:
        cause = _cause(error)
        if not isinstance(cause, OSError):
            free_bytes = shutil.disk_usage(file.parent).free
            number = errno.ENOSPC if free_bytes < _LITTLE_BYTES else errno.EIO
            reason = f"{os.strerror(number)} ({sentence_of(cause)}; {free_bytes:,} bytes are free)"
            cause = OSError(number, reason, str(file))
        raise cause from None


def _alone(tensor: Any, at_rest: Mapping[UntypedStorage, Tensor]) -> Tensor:
    """Copies a tensor to memory of its own on the host if needed: torch.save writes all memory that a view shares."""
    on_host = values_at_rest(tensor, at_rest).detach().cpu()
    return on_host if on_host.untyped_storage().nbytes() == on_host.nbytes else on_host.clone()


def read_entries(directory: Path) -> dict[str, TensorStorageMetadata]:
    """Reads the shape and dtype of every tensor of a checkpoint, by name, without reading the tensors.

    Raises:
        DamagedCheckpoint: the checkpoint is missing, or one of its files is missing or too short.
    """
    tensors = _read_metadata(directory).state_dict_metadata.items()
    return {name: tensor for name, tensor in tensors if isinstance(tensor, TensorStorageMetadata)}


def read_parts(directory: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Reads named tensors of a checkpoint in that order; yields (name, part) as ranks wrote them, first rows first.

    Raises:
        DamagedCheckpoint: see `read_entries`.
    """
    reader = FileSystemReader(directory)
    parts = defaultdict(list)
    for index, stored in _read_metadata(directory).storage_data.items():
        parts[index.fqn].append((tuple(index.offset or ()), stored))
    for name in names:
        for _, stored in sorted(parts[name], key=itemgetter(0)):
            with reader.fs.create_stream(directory / stored.relative_path, "rb") as file:
                part = reader._slice_file(file, stored)  # noqa: SLF001 # what torch's reader gives to torch.load
                try:
                    tensor = torch.load(part, map_location="cpu", weights_only=True)
                except Exception as error:  # of a torn file it may raise anything
                    raise DamagedCheckpoint(
                        f"checkpoint {directory} is torn: {stored.relative_path} cannot be read"
                    ) from error
            yield name, tensor


def stored_weights(directory: Path) -> dict[str, TensorStorageMetadata]:
    """Reads the shape and dtype of each weight of the model, by its name in the model; see `read_entries`."""
    entries = read_entries(directory).items()
    return {name.removeprefix(_MODEL): entry for name, entry in entries if name.startswith(_MODEL)}


def read_weights(directory: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Reads weights of the model whole into memory, by their names in the model; raises the errors of `read_parts`."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for key, part in read_parts(directory, [f"{_MODEL}{name}" for name in names]):
        parts[key.removeprefix(_MODEL)].append(part)
    return {name: torch.cat(rows) if len(rows) > 1 else rows[0] for name, rows in parts.items()}


def read_shards(directory: Path, state: dict[str, Tensor]) -> None:
    """Reads a checkpoint into the tensors of `state` (this rank's part of sharded ones), without communication."""
    with warnings.catch_warnings(), _storage_errors():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state_dict_loader.load(state, checkpoint_id=str(directory), no_dist=True)


def _read_metadata(directory: Path) -> Metadata:
    """Reads which tensors a checkpoint has and where, after a check that all their files are there and long enough.

    Raises:
        DamagedCheckpoint: the checkpoint is incomplete or torn.
    """
    if not (directory / ".metadata").is_file():
        raise DamagedCheckpoint(f"{directory} holds no complete checkpoint")
    try:
        metadata = FileSystemReader(str(directory)).read_metadata()
    except Exception as error:  # unpickling a torn file may raise anything
        raise DamagedCheckpoint(f"checkpoint {directory} is torn: .metadata cannot be read") from error
    expected_bytes: dict[str, int] = defaultdict(int)
    for entry in metadata.storage_data.values():
        expected_bytes[entry.relative_path] = max(expected_bytes[entry.relative_path], entry.offset + entry.length)
    for name, num_bytes in expected_bytes.items():
        if not (directory / name).is_file():
            raise DamagedCheckpoint(f"checkpoint {directory} is torn: {name} is missing")
        if (size := (directory / name).stat().st_size) < num_bytes:
            raise DamagedCheckpoint(f"checkpoint {directory} is torn: {name} has {size} of {num_bytes} bytes")
    return metadata


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Converts an error in the `with` block to the OSError that caused it, else to a RuntimeError.

    torch's CheckpointException is a BaseException, which the `except Exception` of a caller would not catch.
    """
    failure = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # noqa: BLE001 # raised below
        failure = _cause(error)
    if failure is not None:  # without `from`: an error that is its own cause would be an endless chain
        raise failure


def _cause(error: BaseException) -> Exception:
    """Finds the OSError that torch has wrapped into an error; else makes a RuntimeError of the error's last line."""
    below: list[BaseException | None] = [error]
    for failure in below:  # grows while it is walked
        if isinstance(failure, OSError):
            return failure
        if isinstance(failure, CheckpointException):
            below += [of_rank for of_rank, _ in failure.failures.values()]
        if failure is not None:
            below += [failure.__cause__, failure.__context__]
    return RuntimeError(str(error).strip().rpartition("\n")[2])
