"""Decodes rows together with a causal language model and a KV cache; rows can be removed, replaced and added.

A model that reads images gets a position of each token in time, height and width. The tokens of an image share
positions, so those of later tokens are smaller than the number of tokens before them, by an offset that a row keeps.

Shapes: R rows, U different prompts, P prompt tokens (left-padded), W positions of the longest row, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from services.engine.batching.micro_batch_images import MicroBatchImages, RowImages
from services.engine.model.vision import given_images
from services.rollout.hf_backend.kv_cache import GrowingCache
from splitppo.batch import Array
from splitppo.images.positions import image_positions
from splitppo.images.settings import ImageSettings
from splitppo.machine.memory_limits import MAX_MASK


class DecodedRows:
    """Rows that are decoded together, with the logits of each next token. All rows end at the same cache position.

    Shorter rows have padding before them. The model is any Hugging Face causal language model with a dynamic cache; for
    rows that share one prompt array, the prompt is computed once. Prompts are computed in parts, see `_parts`.
    `can_join` is False for models whose state is more than keys and values; `put` cannot be used then, and all prompts
    are one part. A model that has states in place of keys and values (`_has_states`) takes them as `cache_params`, and
    a mask only for prompts: padding is in no state.
    """

    logits: Tensor  # [R, V] of each row's next token
    _lengths: NDArray[np.int64]  # [R] tokens of each row
    _offsets: NDArray[np.int64]  # [R] of the position of each row's next token, from the number of tokens before it
    _width: int

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Array],
        device: torch.device,
        *,
        images: Sequence[RowImages] = (),
        max_mask: int = MAX_MASK,
    ) -> None:
        """Computes the prompts, each different array once, then arranges the rows in the order of `prompts`.

        The first part makes the cache, the others are put behind it. `images` are those of each prompt; if it is empty,
        no prompt has any.

        Raises:
            ValueError: an image cannot be read, see `MicroBatchImages.of`.
        """
        unique = [*{id(prompt): prompt for prompt in prompts}.values()]
        images_of = {id(prompt): of_prompt for prompt, of_prompt in zip(prompts, images, strict=bool(images))}
        self._model = model
        self._device = device
        self._image_settings: ImageSettings | None = getattr(model, "image_settings", None)
        self._cache = GrowingCache(model.config)
        self._has_states = "cache_params" in inspect.signature(model.forward).parameters
        self.can_join = self._cache.can_join
        first, *others = _parts(unique, max_mask) if self.can_join else [unique]
        self._prefill(first, [images_of.get(id(prompt), ()) for prompt in first])
        for part in others:
            num_rows = len(self._lengths)
            images_of_part = [images_of.get(id(prompt), ()) for prompt in part]
            added = DecodedRows(model, part, device, images=images_of_part, max_mask=max_mask)
            self.put(range(num_rows, num_rows + len(part)), added)
        if others or len(prompts) > len(unique):
            computed = [prompt for part in (first, *others) for prompt in part]
            row_of = {id(prompt): row for row, prompt in enumerate(computed)}
            self.keep([row_of[id(prompt)] for prompt in prompts])

    def append(self, tokens_R: Tensor) -> None:
        """Adds one token to each row and computes the logits of each row's next token."""
        positions_R1 = (self._lengths + self._offsets)[:, None]
        self._lengths = self._lengths + 1
        self._width = self._width + 1
        self._forward(tokens_R[:, None], self._on_device(self._in_space(positions_R1)))

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only the rows at these indices, in that order; an index may come several times."""
        indices = self._on_device(np.array(rows, dtype=np.int64))
        self._cache.reorder_cache(indices)
        self._lengths = self._lengths[rows]
        self._offsets = self._offsets[rows]
        self.logits = self.logits[indices]
        self._show_longest()

    def put(self, places: Sequence[int], others: DecodedRows) -> None:
        """Replaces the rows at the indices `places` by the rows of `others`, in that order; indices may be new ones."""
        if (num_added := max(places) + 1 - len(self._lengths)) > 0:
            self.keep([*range(len(self._lengths)), *[0] * num_added])
        indices = self._on_device(np.array(places, dtype=np.int64))
        self._cache.put(indices, others._cache)
        self._lengths[places] = others._lengths
        self._offsets[places] = others._offsets
        self.logits[indices] = others.logits
        self._show_longest()

    def _show_longest(self) -> None:
        """Takes the length of the longest row as the width, after rows have come or gone."""
        if self.can_join:
            self._width = int(self._lengths.max())
            self._cache.show(self._width)

    def _prefill(self, prompts: Sequence[Array], images: Sequence[RowImages]) -> None:
        """Computes the first rows, left-padded to the longest one, with the images in them."""
        self._lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        self._width = int(self._lengths.max())
        num_padded = self._width - self._lengths
        places_UP = np.arange(self._width) - num_padded[:, None]
        ids_UP = np.zeros(places_UP.shape, np.int64)
        ids_UP[places_UP >= 0] = np.concatenate(prompts)
        positions = self._in_space(np.maximum(places_UP, 0))
        given = None
        if self._image_settings is not None:
            starts_U = np.arange(len(prompts)) * self._width + num_padded
            given = MicroBatchImages.of(prompts, images, starts_U, self._image_settings, self._device)
            self._place_images(positions, prompts, images, self._image_settings)
        self._offsets = positions.reshape(-1, *ids_UP.shape)[..., -1].max(axis=0) + 1 - self._lengths
        self._forward(self._on_device(ids_UP), self._on_device(positions), given)

    def _place_images(
        self,
        positions_3UP: NDArray[np.int64],
        prompts: Sequence[Array],
        images: Sequence[RowImages],
        settings: ImageSettings,
    ) -> None:
        """Replaces the positions of prompts that have images."""
        for positions_3P, prompt, of_prompt in zip(positions_3UP.swapaxes(0, 1), prompts, images, strict=True):
            if of_prompt:
                grids = [(image.rows, image.columns) for image in of_prompt]
                positions_3P[:, -len(prompt) :] = image_positions(prompt, grids, settings)

    def _in_space(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns positions as the model takes them: for one that reads images in time, height and width, all equal."""
        return positions if self._image_settings is None else np.repeat(positions[None], 3, axis=0)

    def _forward(self, ids: Tensor, positions: Tensor, images: MicroBatchImages | None = None) -> None:
        """Computes the tokens `ids` [rows, new tokens] at `positions`, and keeps the logits after the last one.

        `positions` are one for each token, or three. The cache grows by these tokens. A model with states gets no mask
        for one more token: padding is in no state.
        """
        is_one_more = ids.shape[1] == 1 and self._width > 1  # not a prompt of one token
        with given_images(self._model, images, ids.shape) as with_images:
            outputs: Any = self._model(
                input_ids=ids,
                attention_mask=None if self._has_states and is_one_more else self._mask(),
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **with_images,
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


def _parts(prompts: Sequence[Array], max_mask: int) -> list[list[Array]]:
    """Divides prompts into parts that are computed one after the other, so that attention masks stay small.

    The mask of padded rows has rows x W^2 numbers, W being the longest one of them: at most `max_mask`. Prompts of one
    length need no mask. More than one part begin with the longest prompts.
    """
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths) == max(lengths) or len(prompts) * max(lengths) ** 2 <= max_mask:
        return [[*prompts]]
    parts: list[list[Array]] = []
    for prompt in sorted(prompts, key=len, reverse=True):
        width = len(parts[-1][0]) if parts else 0
        if parts and (len(prompt) == width or (len(parts[-1]) + 1) * width**2 <= max_mask):
            parts[-1].append(prompt)
        else:
            parts.append([prompt])
    return parts
