"""Keeps weights in main memory while they wait, and on the device while a command needs them.

A tensor stays the same object for FSDP2, the optimizer and a save: only the memory of its storage on the device is
freed, and allocated again (docs/adr/054). For the moments of AdamW see `optimizer`.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage, nn

from services.engine import parallel

log = logging.getLogger(__name__)

_ALIGNMENT = 64


class Rest:
    """Moves tensors to main memory, and back to the device for each `with` block of `awake`; by copies, exactly.

    At rest a tensor has no memory on the device, and nobody may read it. Its copy in main memory (pinned for a GPU)
    stays allocated. The copy is written only after a block that may have changed values.

    Args:
        tensors: returns all tensors that rest, also those that are new.
        is_on: False: the tensors never rest, and the methods do nothing.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device, *, is_on: bool) -> None:
        self._tensors = tensors
        self._device = device
        self._is_on = is_on
        self._copies: dict[UntypedStorage, Tensor] = {}
        self._num_blocks = 0
        self._has_changed = False
        self._has_frozen_changed = False
        if is_on:
            _warn_on_cpu(device.type)
        self.rest()

    @contextmanager
    def awake(self, *, changes: bool = False, of_frozen: bool = False) -> Iterator[None]:
        """Keeps the tensors on the device during a `with` block, which may lie inside another one.

        Values may change only with `changes`, those of frozen weights only with `of_frozen`, too, and not while a save
        is reading `copies`.
        """
        self._num_blocks += 1
        try:
            if self._num_blocks == 1:
                for storage, copy in self._copies.items():
                    storage.resize_(copy.nbytes)
                    _bytes_of(storage).copy_(copy, non_blocking=True)
            self._has_changed |= changes
            self._has_frozen_changed |= of_frozen
            yield
        finally:
            self._num_blocks -= 1
            if not self._num_blocks:
                self.rest()

    def rest(self) -> None:
        """Frees the memory of all tensors on the device; first copies values that have changed, and new tensors."""
        if not self._is_on:
            return
        is_cuda = self._device.type == "cuda"
        storages = {
            parallel.local(tensor.detach()).untyped_storage(): self._has_changed_of(tensor)
            for tensor in self._tensors()
        }
        new = [storage for storage in storages if storage not in self._copies]
        made = dict(zip(new, host_memory([storage.nbytes() for storage in new], pinned=is_cuda), strict=True))
        copies = {storage: made[storage] if storage in made else self._copies[storage] for storage in storages}
        for storage, has_changed in storages.items():
            if storage in made or has_changed:
                copies[storage].copy_(_bytes_of(storage), non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize(self._device)
        for storage in copies:
            storage.resize_(0)
        self._copies = copies
        self._has_changed = False
        self._has_frozen_changed = False
        if is_cuda:
            torch.cuda.empty_cache()  # another engine on this device gets the memory

    def _has_changed_of(self, tensor: Tensor) -> bool:
        """Returns True if a tensor's values may have changed: those of a frozen weight only by loading."""
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        return self._has_frozen_changed if is_frozen else self._has_changed

    @property
    def copies(self) -> Mapping[UntypedStorage, Tensor]:
        """The bytes in main memory of every storage that is at rest now; see `values_at_rest`."""
        return {} if self._num_blocks else self._copies


def values_at_rest(tensor: Tensor, copies: Mapping[UntypedStorage, Tensor]) -> Tensor:
    """Returns a tensor's values in main memory if its storage is among `copies` of a `Rest`, else the tensor."""
    copy = copies.get(tensor.untyped_storage())
    if copy is None:
        return tensor
    values = copy.view(tensor.dtype)
    return values.as_strided(tensor.shape, tensor.stride(), values.storage_offset() + tensor.storage_offset())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def host_memory(sizes: Sequence[int], *, pinned: bool) -> Iterator[Tensor]:
    """Yields memory of these sizes, from pieces of 2^k bytes: PyTorch rounds pinned memory up to such a size.

    A new piece has the largest power of two that does not exceed what is still needed, so a few pieces serve for all
    and little is left over; a size that is larger gets a piece of its own.
    """
    piece = torch.empty(0, dtype=torch.uint8)
    remaining = sum(sizes)
    for size in sizes:
        if size > len(piece):
            piece = torch.empty(max(size, 1 << remaining.bit_length() - 1), dtype=torch.uint8, pin_memory=pinned)
        yield piece[:size]
        piece = piece[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        remaining -= size


@functools.cache
def _warn_on_cpu(device_type: str) -> None:
    if device_type == "cpu":
        log.warning("param_offload saves nothing on a CPU: it copies to main memory what is there")
