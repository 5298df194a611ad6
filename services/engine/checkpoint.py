"""Saves and loads checkpoints of a trained model; a save runs in the background, without a copy of the model.

Keys of the saved tensors: model.<name>, optimizer.<name>.<moment>, num_updates, rng.<rank>.<device>, extra (rank 0's
service state). Beside the shards, `huggingface/` has config and tokenizer, and on request the weights (else use
`services.engine.export`). With adapters, only what is trained is saved; for the rest see `model.adapter_checkpoint`.
"""

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn

from services.engine import hf_folder, parallel
from services.engine.device_thread import device_thread
from services.engine.model.adapter_checkpoint import (
    AdapterBase,
    check_adapters,
    file_states,
    merged_weights,
    read_base,
    write_adapter,
)
from services.engine.model.adapters import rank_of, saved_parameters, trained_parameters
from services.engine.model.vision import VISION_TOWER
from services.engine.optimizer import MOMENTS, BucketedAdamW
from services.engine.shards import ShardWriter, read_entries, read_parts, read_shards, read_weights, stored_weights
from services.engine.weights_digest import values_digest
from splitppo import failpoints
from splitppo.file_lock import any_lock

log = logging.getLogger(__name__)

HF_FOLDER = "huggingface"
ADAMW_STATE = ("step", *MOMENTS)
_PROGRESS_INTERVAL_S = 1.0
# A rank that has written its part waits for the others; the watch over peers notices a dead rank at once.
_GROUP_TIMEOUT = timedelta(days=7)


class Checkpointer:
    """Writes and reads the checkpoints of one model; every rank has one, and all ranks call each method together.

    Saving has its own gloo group and its own thread, so that its collectives do not mix with those of training. Saving
    reads weights and moments in place: call `wait_until_written` before they change. The files of the folder
    `source` beside its config and weights are copied into `huggingface/`. A rank writes while it has the lock of one of
    the files `writer_locks`, if there are any. `base` describes the frozen model under the adapters; None without
    adapters.

    Raises:
        ValueError: transformers could not load what a checkpoint would hold.
    """

    def __init__(
        self, model: Any, source: Path, writer_locks: Sequence[Path] = (), base: AdapterBase | None = None
    ) -> None:
        """Prepares saves of a model; called on all ranks together, because it makes a process group."""
        hf_folder.check_can_be_saved(model.config)
        self._model = model
        self._source = source
        self._writer_locks = writer_locks
        self._base = base
        self._base_files = file_states(source) if base is not None else ()  # as they were when the model was loaded
        self._group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT) if dist.is_initialized() else None
        self._thread = device_thread("checkpoint")
        self._last: Future[str] | None = None
        self._writer: ShardWriter | None = None

    def save(
        self,
        directory: Path,
        optimizer: BucketedAdamW,
        *,
        at_rest: Mapping[UntypedStorage, Tensor],
        num_updates: int,
        service_state: bytes,
        with_hf_model: bool,
    ) -> Future[str]:
        """Waits for the previous save, then starts to write model and optimizer, as they are now, in the background.

        `at_rest` has the values of the storages that are at rest, see `Rest.copies`.

        Returns:
            a future that resolves when the parts of all ranks are on storage. On rank 0 it also waits for
            `huggingface/`, and its result is the sha256 of the weights as read back from storage ("" on other ranks).
            The future fails with OSError if storage has failed.
        """
        if self._last is not None:
            wait([self._last])
        if parallel.rank() == 0:
            _empty(directory)
        state = {
            **model_entries(self._model),
            **_optimizer_entries(self._model, optimizer.state),
            "num_updates": torch.tensor(num_updates),
            **_rng_entries(),
        }
        if parallel.rank() == 0:
            state["extra"] = torch.frombuffer(bytearray(service_state or b"\0"), dtype=torch.uint8)
            state["extra_length"] = torch.tensor(len(service_state))
        failpoints.hit("save_checkpoint.writing")
        self._writer = writer = ShardWriter(directory, self._writer_locks, at_rest)
        stream = _stream_behind_training()

        def write() -> str:
            with stream:
                writer.write(state, self._group)
            state.clear()
            return self._finish(directory, with_hf_model=with_hf_model)

        self._last = self._thread.submit(write)
        return self._last

    def wait_until_written(self, progress: Callable[[int, int, str], None]) -> None:
        """Waits until the last save has written the tensors of all ranks, so that training may change them.

        While this rank writes, only written tensors are progress. While it waits for other ranks, waiting is progress,
        because each of them reports its own.
        """
        if (writer := self._writer) is None:
            return
        began_s = time.perf_counter()
        num_written = writer.num_written
        while not writer.is_done.wait(_PROGRESS_INTERVAL_S):
            if writer.num_written > num_written or not writer.is_writing:  # else the heartbeat counts it as silence
                num_written = writer.num_written
                progress(num_written, writer.num_tensors, "save")
        if (waited_s := time.perf_counter() - began_s) > _PROGRESS_INTERVAL_S:
            log.info("waited %.1f s until the checkpoint was written", waited_s)
        self._writer = None

    def _finish(self, directory: Path, *, with_hf_model: bool) -> str:
        """Completes a save on rank 0 after all tensors are written, and returns the digest of the saved weights.

        Writes `huggingface/`, and with adapters their own files. Other ranks have nothing to do and return an empty
        text.
        """
        if parallel.rank() != 0:
            return ""
        with any_lock(self._writer_locks):
            hf_folder.copy_files(self._source, directory / HF_FOLDER)
            hf_folder.write_config(self._model.config, self._model.config.dtype, directory / HF_FOLDER)
            if self._base is not None:
                self._base = self._base.with_digests(self._base_files)
                write_adapter(directory, self._model, self._base)
            if with_hf_model:
                write_hf_weights(directory, directory / HF_FOLDER)
        names = sorted(saved_parameters(self._model))
        return values_digest(part for _, part in read_parts(directory, [f"model.{name}" for name in names]))

    def check(self, directory: Path) -> dict[str, torch.Size]:
        """Checks that a checkpoint is whole and fits this model and, on rank 0, its base; see `check_checkpoint`."""
        check_adapters(directory, self._model, self._base if parallel.rank() == 0 else None, self._base_files)
        return check_checkpoint(directory, self._model)

    def load(
        self, directory: Path, optimizer: BucketedAdamW, progress: Callable[[int, int, str], None]
    ) -> tuple[int, bytes]:
        """Loads a checkpoint from any number of ranks into model and optimizer; returns (num_updates, service_state).

        Raises:
            ValueError: the checkpoint is missing, torn or of another model; nothing has changed then.
        """
        model = self._model
        shapes = self.check(directory)
        self.wait_until_written(progress)
        optimizer.state.clear()  # first, else moments would be in memory twice
        named = trained_parameters(model).items()
        moments = optimizer.fresh_states([weight for name, weight in named if f"optimizer.{name}.step" in shapes])
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
        optimizer.state.update(moments)
        for name, value in rng.items():
            (torch.set_rng_state if name.endswith("cpu") else torch.cuda.set_rng_state)(value)
        return int(state["num_updates"]), state["extra"].numpy().tobytes()[: int(state["extra_length"])]


def _empty(directory: Path) -> None:
    """Removes the files of an unfinished save, but not the checkpoint folder: other ranks may be creating it now."""
    directory.mkdir(parents=True, exist_ok=True)
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def check_checkpoint(directory: Path, model: nn.Module) -> dict[str, torch.Size]:
    """Checks that a checkpoint is whole and fits a model; returns the shape of each saved tensor.

    One rank may call it alone.

    Raises:
        DamagedCheckpoint: the checkpoint is missing or torn.
        ValueError: the checkpoint is of another model, or of one in which weights have learned that are frozen here.
    """
    saved = {name: entry.size for name, entry in read_entries(directory).items()}
    expected = {f"model.{name}": parameter.shape for name, parameter in saved_parameters(model).items()}
    # Only persistent buffers are saved.
    buffers = {f"model.{name}": buffer.shape for name, buffer in model.named_buffers()}
    expected |= {name: shape for name, shape in buffers.items() if name in saved}
    for name in [*expected, *(name for name in saved if name.startswith("model."))]:
        here = list(expected[name]) if name in expected else "nothing"
        there = list(saved[name]) if name in saved else "nothing"
        if here != there:
            raise ValueError(f"checkpoint {directory} is of another model: {name} has shape {here} here, {there} there")
    frozen = saved_parameters(model).keys() - trained_parameters(model).keys()
    if lost := sorted(name for name in frozen if f"optimizer.{name}.step" in saved):
        key = "freeze_vision_tower" if lost[0].startswith(VISION_TOWER) else "freeze"
        raise ValueError(
            f"checkpoint {directory} has moments of {lost[0]}, which `{key}` keeps from learning here: resume with the"
            f" `{key}` that it was made with"
        )
    return saved


def write_hf_weights(directory: Path, folder: Path) -> None:
    """Writes the weights of a checkpoint into a Hugging Face folder that has a config; called in one process alone.

    Adapters are merged into the weights of their base.

    Raises:
        ValueError: see `hf_folder.write_weights` and `merged_weights`.
        OSError: storage has failed.
    """
    if (base := read_base(directory)) is not None:
        hf_folder.write_weights(folder, *merged_weights(directory, folder, base))
        return
    entries = stored_weights(directory).items()
    num_bytes = {name: entry.size.numel() * entry.properties.dtype.itemsize for name, entry in entries}
    hf_folder.write_weights(folder, num_bytes, partial(read_weights, directory))


def model_entries(model: nn.Module) -> dict[str, Tensor]:
    """Returns this rank's part of each parameter (tied ones once) and persistent buffer, by its key model.<name>.

    With adapters only of `saved_parameters`: buffers belong to the base.
    """
    once = saved_parameters(model)
    if rank_of(model):
        return {f"model.{name}": parameter.detach() for name, parameter in once.items()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once.keys()
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items() if name not in tied}


def _optimizer_entries(model: nn.Module, moments: Mapping[Any, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the optimizer's part of a checkpoint by key; a weight without a step so far has no moments."""
    return {
        f"optimizer.{name}.{moment}": moments[parameter][moment]
        for name, parameter in trained_parameters(model).items()
        if parameter in moments
        for moment in ADAMW_STATE
    }


def _rng_entries() -> dict[str, Tensor]:
    """Returns the states of this rank's torch random generators (CPU, CUDA), by checkpoint key rng.<rank>.<device>."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"rng.{parallel.rank()}.{device}": state for device, state in states.items()}


def _stream_behind_training() -> AbstractContextManager[Any]:
    """Makes a context in which copies use their own CUDA stream: after work queued so far, in parallel to later work.

    On a CPU the context does nothing.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return nullcontext()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)
