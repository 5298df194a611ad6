"""A KV cache for decoding that grows in place, and whose rows can be replaced.

The cache of Hugging Face copies all keys and values for every token, and all of its rows begin together. Here a new row
can replace one that has ended: its keys and values are stored so that they end at the same position as those
of the other rows, and the attention mask must hide the positions before them.

Shapes: R rows, H key-value heads, L positions shown, D head dimension.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from splitppo.machine.memory_limits import KV_ROOM


class GrowingCache(DynamicCache):  # type: ignore[misc]
    """The KV cache of a model, with growing layers; layers with another state keep their Hugging Face cache."""

    layers: list[Any]

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.layers = [_growing(layer) for layer in self.layers]
        self.can_join = bool(self.layers) and all(isinstance(layer, _GrowingLayer) for layer in self.layers)

    def put(self, places: Tensor, other: GrowingCache) -> None:
        """Replaces the rows at indices `places` by another cache's rows, in order.

        The model then sees as many positions as the longer of both caches has.
        """
        for layer, other_layer in zip(self.layers, other.layers, strict=True):
            layer.put(places, other_layer)

    def show(self, num_positions: int) -> None:
        """Shows the model only the last `num_positions` positions from now on, because the longest row has no more."""
        for layer in self.layers:
            layer.length = num_positions


class _GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """The keys and values of one model layer, in buffers with room for more positions.

    With a sliding window a token sees itself and the window - 1 tokens before it.
    """

    keys: Tensor  # [R, H, L, D] (with a window: its part), a view of the buffers
    values: Tensor
    _buffers: list[Tensor]  # of keys and of values

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.length = 0  # L, positions of the longest row
        self._window = window
        self._end = 0  # of the positions in use; all before it are finite numbers, shown or not

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._buffers = [key_states[:, :, :0], value_states[:, :, :0]]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Appends keys and values of new positions; returns all keys and values that these positions may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_new = key_states.shape[2]
        num_held = self._num_held
        if self._end + num_new > self._buffers[0].shape[2]:
            self._make_room(num_held, num_new)
        start = self._end - num_held
        new = self._end
        self._end = self._end + num_new
        self.length += num_new
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, new : self._end] = states
        self.keys, self.values = (buffer[:, :, start : self._end] for buffer in self._buffers)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps only the cache rows at these indices, in that order; an index may come several times."""
        start = self._end - self._num_held
        self._buffers = [buffer[:, :, start:][beam_idx] for buffer in self._buffers]
        self._end -= start

    def put(self, places: Tensor, other: _GrowingLayer) -> None:
        """Replaces this layer's rows at indices `places` by another layer's; see `GrowingCache.put`."""
        num_put = other._num_held
        if num_put > self._end:
            self._make_room(num_put, 0)
        here = slice(self._end - num_put, self._end)
        there = slice(other._end - num_put, other._end)
        for buffer, other_buffer in zip(self._buffers, other._buffers, strict=True):
            buffer[places, :, here] = other_buffer[:, :, there]
        self.length = max(self.length, other.length)

    def get_seq_length(self) -> int:
        """Returns the number of token positions of the longest row in the cache."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns for the attention mask: (number of keys that the next queries see, position of the first key)."""
        return self._num_held + query_length, self.length - self._num_held

    @property
    def _num_held(self) -> int:
        """The number of cached positions that the next token may see."""
        return self.length if self._window is None else min(self.length, self._window - 1)

    def _make_room(self, end: int, num_new: int) -> None:
        """Copies the visible positions into larger buffers, in which they end at index `end`."""
        old = slice(self._end - self._num_held, self._end)
        new = slice(end - self._num_held, end)
        for index, buffer in enumerate(self._buffers):
            num_rows, num_heads, _, head_dim = buffer.shape
            self._buffers[index] = buffer.new_zeros((num_rows, num_heads, end + num_new + KV_ROOM, head_dim))
            self._buffers[index][:, :, new] = buffer[:, :, old]
        self._end = end


def _growing(layer: CacheLayerMixin) -> CacheLayerMixin:
    """Returns a growing layer for one of keys and values alone; a layer with another state stays as it is."""
    if type(layer) is DynamicSlidingWindowLayer:
        return _GrowingLayer(layer.sliding_window)
    return _GrowingLayer() if type(layer) is DynamicLayer else layer
