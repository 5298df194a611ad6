"""Checkpoints of a trained model: shards by torch.distributed.checkpoint, written in the background.

Keys: model.<name>, optimizer.<name>.<moment>, num_updates, rng.<rank>.<device>, extra (rank 0's bytes). Beside the
shards, `huggingface/` holds config and tokenizer, and the weights where asked for (`services.engine.export` makes them
later).
"""

from __future__ import annotations

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
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from services.engine import hf_folder, parallel
from services.engine.digest import values_digest
from splitppo import failpoints
from splitppo.manifest import DamagedCheckpoint

HF_FOLDER = "huggingface"
ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
# Weights that are in memory once more while a save reads them back.
_READ_BACK_BYTES = 256 << 20


class Checkpointer:
    """Writes and reads the checkpoints of one model; every rank has one, and all call each method together.

    Saving has a gloo group and a thread of its own, so that it never meets the collectives of training.

    Args:
        source: folder whose tokenizer files go into `huggingface/`.
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
        extra: bytes,
        with_hf_model: bool,
    ) -> Future[str]:
        """Snapshots, then writes in the background; waits for the save before it.

        Returns:
            resolves when the parts of all ranks are on storage; on rank 0 when `huggingface/` is, too, with the
            sha256 of the weights as they were read back. OSError where storage has failed.
        """
        if self._last is not None:
            wait([self._last])
        if parallel.rank() == 0:
            _empty(directory)
        weights = _whole_weights(model) if with_hf_model else {}
        state = {
            **model_entries(model),
            **_optimizer_entries(model, optimizer),
            "num_updates": torch.tensor(num_updates),
            **_rng_entries(),
        }
        if parallel.rank() == 0:
            state["extra"] = torch.frombuffer(bytearray(extra or b"\0"), dtype=torch.uint8)
            state["extra_length"] = torch.tensor(len(extra))
        failpoints.hit("save_checkpoint.writing")
        written = state_dict_saver.async_save(
            state, checkpoint_id=str(directory), process_group=self._group, no_dist=self._group is None
        )
        if not isinstance(written, Future):
            written = written.upload_completion
        self._last = self._thread.submit(self._finish, written, directory, model, weights)
        return self._last

    def _finish(self, written: Future[Any], directory: Path, model: Any, weights: dict[str, Tensor]) -> str:
        """Waits for the shards of all ranks; rank 0 adds the Hugging Face folder, and reads the weights back."""
        if (error := written.exception()) is not None:
            raise _cause(error)  # not from it: an error that is its own cause is a circle for whoever follows it
        if parallel.rank() != 0:
            return ""
        hf_folder.write_description(model, self._source, directory / HF_FOLDER)
        if weights:
            hf_folder.write_weights(directory / HF_FOLDER, weights)
        return saved_weights_digest(directory, sorted(name for name, _ in model.named_parameters()))

    def load(self, directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, bytes]:
        """Loads in place what `save` wrote from any number of ranks; each rank reads its own part.

        Returns:
            (num_updates, extra)

        Raises:
            ValueError: missing, torn or of another model; nothing has changed then.
        """
        check_checkpoint(directory, model)
        sizes = tensor_sizes(read_metadata(directory))
        weights = model_entries(model)
        moments = _fresh_moments(model, sizes)
        rng = {key: value for key, value in _rng_entries().items() if key in sizes}
        state: dict[str, Tensor] = {
            **weights,
            **{
                f"optimizer.{name}.{moment}": tensor
                for name, state in moments.items()
                for moment, tensor in state.items()
            },
            **rng,
            "num_updates": torch.tensor(0),
            "extra": torch.empty(sizes["extra"], dtype=torch.uint8),
            "extra_length": torch.tensor(0),
        }
        read_shards(directory, state)
        optimizer.state.clear()
        for name, parameter in model.named_parameters():
            if name in moments:
                optimizer.state[parameter] = moments[name]
        _restore_rng(rng)
        extra = state["extra"].numpy().tobytes()[: int(state["extra_length"])]
        return int(state["num_updates"]), extra


def _empty(directory: Path) -> None:
    """Removes what an unfinished save has left. The folder itself stays: other ranks may be making it now."""
    directory.mkdir(parents=True, exist_ok=True)
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def read_metadata(directory: Path) -> Metadata:
    """What a checkpoint consists of.

    Raises:
        DamagedCheckpoint: missing, or a shard is missing or too short.
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
    return metadata


def check_checkpoint(directory: Path, model: nn.Module) -> None:
    """Whether `directory` holds a whole checkpoint of this model; one rank can ask alone.

    Raises:
        DamagedCheckpoint: missing or torn.
        ValueError: of another model.
    """
    shapes = {f"model.{name}": parameter.shape for name, parameter in model.named_parameters()}
    sizes = tensor_sizes(read_metadata(directory))
    # Of the buffers only persistent ones are saved.
    buffers = {f"model.{name}": buffer.shape for name, buffer in model.named_buffers()}
    saved_buffers = {name: shape for name, shape in buffers.items() if name in sizes}
    _check_fits(directory, {**shapes, **saved_buffers}, sizes)


def saved_weights_digest(directory: Path, names: Sequence[str]) -> str:
    """What `weights_digest` answers once this checkpoint is loaded; one process reads it alone.

    Args:
        directory: a checkpoint.
        names: of the model's parameters, sorted, tied ones once.
    """
    return values_digest(_saved_tensors(directory, [f"model.{name}" for name in names]))


def _saved_tensors(directory: Path, keys: Sequence[str]) -> Iterator[Tensor]:
    """Whole tensors, in the order of their keys; few of them are in memory at a time."""
    entries = read_metadata(directory).state_dict_metadata
    batch: dict[str, Tensor] = {}
    for key in keys:
        entry = entries[key]
        assert isinstance(entry, TensorStorageMetadata)
        batch[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        if sum(tensor.nbytes for tensor in batch.values()) >= _READ_BACK_BYTES or key == keys[-1]:
            read_shards(directory, batch)
            yield from batch.values()
            batch = {}


def read_shards(directory: Path, state: dict[str, Tensor]) -> None:
    """Fills tensors (this rank's part of sharded ones) from a checkpoint; ranks do not wait for each other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state_dict_loader.load(state, checkpoint_id=str(directory), no_dist=True)


def tensor_sizes(metadata: Metadata) -> dict[str, torch.Size]:
    """Shape of every tensor of a checkpoint."""
    entries = metadata.state_dict_metadata.items()
    return {name: entry.size for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def model_entries(model: nn.Module) -> dict[str, Tensor]:
    """model.<name>: this rank's part of every parameter and persistent buffer; tied ones once."""
    once = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items() if name not in tied}


def _optimizer_entries(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"optimizer.{name}.{moment}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in ADAMW_STATE
    }


def _fresh_moments(model: nn.Module, sizes: dict[str, torch.Size]) -> dict[str, dict[str, Tensor]]:
    """Optimizer state to load into, for the parameters that have one in the checkpoint (none before an update)."""
    return {
        name: {
            "step": torch.zeros((), dtype=torch.float32, device=parallel.local(parameter).device),
            "exp_avg": torch.zeros_like(parameter.detach()),
            "exp_avg_sq": torch.zeros_like(parameter.detach()),
        }
        for name, parameter in model.named_parameters()
        if f"optimizer.{name}.step" in sizes
    }


def _check_fits(directory: Path, shapes: Mapping[str, torch.Size], sizes: Mapping[str, torch.Size]) -> None:
    for name, shape in shapes.items():
        if sizes.get(name) != shape:
            found = f"shape {list(sizes[name])}" if name in sizes else "nothing"
            raise ValueError(
                f"checkpoint {directory} is of another model: {name} has shape {list(shape)} here, {found} there"
            )
    for name in sizes:
        if name.startswith("model.") and name not in shapes:
            raise ValueError(
                f"checkpoint {directory} is of another model: {name} is not here, there it has shape"
                f" {list(sizes[name])}"
            )


def _rng_entries() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"rng.{parallel.rank()}.{device}": state for device, state in states.items()}


def _restore_rng(states: dict[str, Tensor]) -> None:
    """Sets generators from loaded states; a rank that did not exist when the checkpoint was written keeps its own."""
    for name, state in states.items():
        (torch.set_rng_state if name.endswith("cpu") else torch.cuda.set_rng_state)(state)


def _whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """On rank 0 copies of all weights on the CPU; elsewhere nothing. All ranks must call it."""
    weights = {}
    for key, tensor in model_entries(model).items():
        whole = parallel.full(tensor)
        if parallel.rank() == 0:
            weights[key.removeprefix("model.")] = whole.to("cpu", copy=True)
    return weights


def _cause(error: BaseException) -> Exception:
    """What kept shards from being written, without the ranks and traces that torch wraps it into.

    torch's errors are no Exceptions; an OSError anywhere below is what happened.
    """
    below: list[BaseException | None] = [error]
    while below:
        one = below.pop(0)
        if one is None:
            continue
        if isinstance(one, OSError):
            return one
        if isinstance(one, CheckpointException):
            below += [failure for failure, _ in one.failures.values()]
        below += [one.__cause__, one.__context__]
    return RuntimeError(str(error).strip().rpartition("\n")[2])
