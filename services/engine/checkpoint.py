"""Checkpoints of a trained model: shards by torch.distributed.checkpoint, written in the background.

Keys: model.<name>, optimizer.<name>.<moment>, num_updates, rng.<rank>.<device>, extra (rank 0's service state). Beside
the shards, `huggingface/` holds config and tokenizer, and the weights where asked for (else `services.engine.export`).
"""

import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from services.engine import hf_folder, parallel
from services.engine.weights_digest import values_digest
from splitppo import failpoints
from splitppo.manifest import DamagedCheckpoint

HF_FOLDER = "huggingface"
ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
# Weights that are in memory once more while a save reads them back.
_READ_BACK_BYTES = 256 << 20


class Checkpointer:
    """Writes and reads the checkpoints of one model; every rank has one, and all call each method together.

    Saving has a gloo group and a thread of its own, so that it never meets the collectives of training. The tokenizer
    files of the folder `source` go into `huggingface/`.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: Future[str] | None = None

    def save(
        self,
        directory: Path,
        model: Any,
        optimizer: torch.optim.Optimizer,
        *,
        num_updates: int,
        service_state: bytes,
        with_hf_model: bool,
    ) -> Future[str]:
        """Waits for the save before it, snapshots, and writes in the background.

        Returns:
            resolves when the parts of all ranks are on storage; on rank 0 when `huggingface/` is, too, with the
            sha256 of the weights as they were read back. OSError where storage has failed.
        """
        if self._last is not None:
            wait([self._last])
        if parallel.rank() == 0:
            _empty(directory)
        state = {
            **model_entries(model),
            **_optimizer_entries(model, optimizer.state),
            "num_updates": torch.tensor(num_updates),
            **_rng_entries(),
        }
        if parallel.rank() == 0:
            state["extra"] = torch.frombuffer(bytearray(service_state or b"\0"), dtype=torch.uint8)
            state["extra_length"] = torch.tensor(len(service_state))
        failpoints.hit("save_checkpoint.writing")
        written = state_dict_saver.async_save(
            state, checkpoint_id=str(directory), process_group=self._group, no_dist=self._group is None
        )
        if not isinstance(written, Future):
            written = written.upload_completion
        self._last = self._thread.submit(self._finish, written, directory, model, with_hf_model)
        return self._last

    def _finish(self, written: Future[Any], directory: Path, model: Any, with_hf_model: bool) -> str:
        if (error := written.exception()) is not None:
            raise _cause(error)  # not from it: an error that is its own cause is a circle for whoever follows it
        if parallel.rank() != 0:
            return ""
        hf_folder.copy_files(self._source, directory / HF_FOLDER)
        model.config.save_pretrained(directory / HF_FOLDER)
        if with_hf_model:
            hf_folder.write_weights(directory / HF_FOLDER, read_weights(directory))
        names = sorted(name for name, _ in model.named_parameters())
        return values_digest(_saved_weights(directory, names))

    def load(self, directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, bytes]:
        """Loads in place what `save` wrote from any number of ranks: (num_updates, service_state).

        Raises:
            ValueError: missing, torn or of another model; nothing has changed then.
        """
        shapes = check_checkpoint(directory, model)
        moments = _fresh_moments(model, shapes)
        rng = {key: value for key, value in _rng_entries().items() if key in shapes}
        state = {
            **model_entries(model),
            **_optimizer_entries(model, moments),
            **rng,
            "num_updates": torch.tensor(0),
            "extra": torch.empty(shapes["extra"], dtype=torch.uint8),
            "extra_length": torch.tensor(0),
        }
        read_shards(directory, state)
        optimizer.state.clear()
        optimizer.state.update(moments)
        for name, value in rng.items():
            (torch.set_rng_state if name.endswith("cpu") else torch.cuda.set_rng_state)(value)
        return int(state["num_updates"]), state["extra"].numpy().tobytes()[: int(state["extra_length"])]


def _empty(directory: Path) -> None:
    """Removes what an unfinished save has left. The folder itself stays: other ranks may be making it now."""
    directory.mkdir(parents=True, exist_ok=True)
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _read_entries(directory: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of every tensor of a checkpoint.

    Raises:
        DamagedCheckpoint: it is missing, or a shard is missing or too short.
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
        if (found := (directory / name).stat().st_size) < num_bytes:
            raise DamagedCheckpoint(f"checkpoint {directory} is torn: {name} has {found} of {num_bytes} bytes")
    tensors = metadata.state_dict_metadata.items()
    return {name: tensor for name, tensor in tensors if isinstance(tensor, TensorStorageMetadata)}


def _empty_tensor(entry: TensorStorageMetadata) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def check_checkpoint(directory: Path, model: nn.Module) -> dict[str, torch.Size]:
    """Shape of every tensor of a whole checkpoint of this model; one rank can ask alone.

    Raises:
        DamagedCheckpoint: missing or torn.
        ValueError: of another model.
    """
    saved = {name: entry.size for name, entry in _read_entries(directory).items()}
    expected = {f"model.{name}": parameter.shape for name, parameter in model.named_parameters()}
    # Of the buffers only persistent ones are saved.
    buffers = {f"model.{name}": buffer.shape for name, buffer in model.named_buffers()}
    expected |= {name: shape for name, shape in buffers.items() if name in saved}
    for name in [*expected, *(name for name in saved if name.startswith("model."))]:
        here, there = (list(shapes[name]) if name in shapes else "nothing" for shapes in (expected, saved))
        if here != there:
            raise ValueError(f"checkpoint {directory} is of another model: {name} has shape {here} here, {there} there")
    return saved


def _saved_weights(directory: Path, names: Sequence[str]) -> Iterator[Tensor]:
    """Whole weights, in the order of their names; few of them are in memory at a time."""
    entries = _read_entries(directory)
    batch: dict[str, Tensor] = {}
    for name in names:
        batch[f"model.{name}"] = _empty_tensor(entries[f"model.{name}"])
        if sum(tensor.nbytes for tensor in batch.values()) >= _READ_BACK_BYTES or name == names[-1]:
            read_shards(directory, batch)
            yield from batch.values()
            batch = {}


def read_shards(directory: Path, state: dict[str, Tensor]) -> None:
    """Fills tensors, of sharded ones this rank's part; ranks do not wait for each other."""
    failure = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            state_dict_loader.load(state, checkpoint_id=str(directory), no_dist=True)
        except CheckpointException as error:  # no Exception
            failure = _cause(error)
    if failure is not None:
        raise failure


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint, whole, by their Hugging Face names; one process reads them alone."""
    entries = _read_entries(directory).items()
    state = {name: _empty_tensor(entry) for name, entry in entries if name.startswith("model.")}
    read_shards(directory, state)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def model_entries(model: nn.Module) -> dict[str, Tensor]:
    """model.<name>: this rank's part of every parameter and persistent buffer; tied ones once."""
    once = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items() if name not in tied}


def _optimizer_entries(model: nn.Module, moments: Mapping[Any, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {
        f"optimizer.{name}.{moment}": moments[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in moments
        for moment in ADAMW_STATE
    }


def _fresh_moments(model: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[Tensor, dict[str, Tensor]]:
    """Optimizer state to load into, of the parameters that have one in the checkpoint (none before an update)."""
    return {
        parameter: {
            "step": torch.zeros((), dtype=torch.float32, device=parallel.local(parameter).device),
            "exp_avg": torch.zeros_like(parameter.detach()),
            "exp_avg_sq": torch.zeros_like(parameter.detach()),
        }
        for name, parameter in model.named_parameters()
        if f"optimizer.{name}.step" in shapes
    }


def _rng_entries() -> dict[str, Tensor]:
    """States of this rank's generators; one that did not exist when a checkpoint was written keeps its own."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"rng.{parallel.rank()}.{device}": state for device, state in states.items()}


def _cause(error: BaseException) -> Exception:
    """What kept shards from being written: an OSError anywhere below what torch wraps it into (no Exceptions)."""
    below: list[BaseException | None] = [error]
    for one in below:  # grows while it is walked
        if isinstance(one, OSError):
            return one
        if isinstance(one, CheckpointException):
            below += [failure for failure, _ in one.failures.values()]
        if one is not None:
            below += [one.__cause__, one.__context__]
    return RuntimeError(str(error).strip().rpartition("\n")[2])
