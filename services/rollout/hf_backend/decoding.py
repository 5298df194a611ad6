"""Decodes rows together with a causal language model and a KV cache; rows can be removed, replaced and added.

Shapes: R rows, U different prompts, P prompt tokens (left-padded), W positions of the longest row, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from services.rollout.hf_backend.kv_cache import GrowingCache
from splitppo.batch import Array


class DecodedRows:
    """Rows that are decoded together, with the logits of each next token. All rows end at the same cache position.

    Shorter rows have padding before them. The model is any Hugging Face causal language model with a dynamic cache; for
    rows that share one prompt array, the prompt is computed once. `can_join` is False for models whose state is more
    than keys and values; `put` cannot be used then. A model that has states in place of keys and values (`_has_states`)
    takes them as `cache_params`, and a mask only for prompts: padding is in no state.
    """

    logits: Tensor  # [R, V] of each row's next token

    def __init__(self, model: nn.Module, prompts: Sequence[Array], device: torch.device) -> None:
        unique = {id(prompt): prompt for prompt in prompts}
        self._model, self._device = model, device
        self._cache = GrowingCache(model.config)
        self._has_states = "cache_params" in inspect.signature(model.forward).parameters
        self.can_join = self._cache.can_join
        self._lengths = np.array([len(prompt) for prompt in unique.values()], dtype=np.int64)
        self._width = int(self._lengths.max())
        positions_UP = np.arange(self._width) - (self._width - self._lengths[:, None])
        ids_UP = np.zeros(positions_UP.shape, np.int64)
        ids_UP[positions_UP >= 0] = np.concatenate(list(unique.values()))
        self._forward(self._on_device(ids_UP), self._on_device(np.maximum(positions_UP, 0)))
        if len(prompts) > len(unique):
            row_of = {key: row for row, key in enumerate(unique)}
            self.keep([row_of[id(prompt)] for prompt in prompts])

    def append(self, tokens_R: Tensor) -> None:
        """Adds one token to each row and computes the logits of each row's next token."""
        positions_R = self._on_device(self._lengths)
        self._lengths, self._width = self._lengths + 1, self._width + 1
        self._forward(tokens_R[:, None], positions_R[:, None])

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only the rows at these indices, in that order; an index may come several times."""
        indices = self._on_device(np.array(rows, dtype=np.int64))
        self._cache.reorder_cache(indices)
        self._lengths, self.logits = self._lengths[rows], self.logits[indices]
        self._show_longest()

    def put(self, places: Sequence[int], others: DecodedRows) -> None:
        """Replaces the rows at the indices `places` by the rows of `others`, in that order; indices may be new ones."""
        if (num_added := max(places) + 1 - len(self._lengths)) > 0:
            self.keep([*range(len(self._lengths)), *[0] * num_added])
        indices = self._on_device(np.array(places, dtype=np.int64))
        self._cache.put(indices, others._cache)
        self._lengths[places], self.logits[indices] = others._lengths, others.logits
        self._show_longest()

    def _show_longest(self) -> None:
        if self.can_join:
            self._width = int(self._lengths.max())
            self._cache.show(self._width)

    def _forward(self, ids: Tensor, positions: Tensor) -> None:
        outputs: Any = self._model(
            input_ids=ids,
            attention_mask=None if self._has_states and ids.shape[1] == 1 < self._width else self._mask(),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{"cache_params" if self._has_states else "past_key_values": self._cache},
        )
        self.logits = outputs.logits[:, -1]

    def _mask(self) -> Tensor | None:
        """Returns the attention mask that hides padding, [R, W] bool; None (cheaper) if no row has padding."""
        num_padded = self._width - self._lengths
        if not num_padded.any():
            return None
        return torch.arange(self._width, device=self._device) >= self._on_device(num_padded)[:, None]

    def _on_device(self, values: Array) -> Tensor:
        return torch.from_numpy(values).to(self._device)
