"""A KV cache that grows in place: the cache of Hugging Face copies all keys and values for every token.

Shapes: R rows, H key-value heads, L positions held, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Positions of room that are made at once.
_ROOM = 64


def growing_cache(config: Any) -> DynamicCache:
    """A cache for a model of this config; layers with a window or a state of their own keep Hugging Face's."""
    cache = DynamicCache(config=config)
    cache.layers = [_GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class _GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [R, H, L, D], views of buffers that have room for more positions."""

    keys: Tensor
    values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._key_buffer, self._value_buffer = key_states[:, :, :0], value_states[:, :, :0]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Appends new positions; returns all."""
        start = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = start + key_states.shape[2]
        if end > self._key_buffer.shape[2]:
            self._key_buffer = _with_room(self._key_buffer[:, :, :start], end + _ROOM)
            self._value_buffer = _with_room(self._value_buffer[:, :, :start], end + _ROOM)
        self._key_buffer[:, :, start:end] = key_states
        self._value_buffer[:, :, start:end] = value_states
        self.keys, self.values = self._key_buffer[:, :, :end], self._value_buffer[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows at `indices`, in that order."""
        length = self.get_seq_length()
        if length:
            self._key_buffer, self._value_buffer = self._key_buffer[indices], self._value_buffer[indices]
            self.keys, self.values = self._key_buffer[:, :, :length], self._value_buffer[:, :, :length]


def _with_room(held: Tensor, num_positions: int) -> Tensor:
    buffer = torch.empty((*held.shape[:2], num_positions, held.shape[3]), dtype=held.dtype, device=held.device)
    buffer[:, :, : held.shape[2]] = held
    return buffer
