"""Rollout on the trained model itself: batched decoding over any Hugging Face causal LM's forward with a KV cache.

Needs no second copy of the weights and no second engine. A prompt is prefilled once for all its samples; rows that have
met a stop token leave the batch.

Shapes: U different prompts, P prompt tokens (left-padded), R rows decoded together, T response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from services.actor.rollout.kv_cache import growing_cache
from services.actor.rollout.protocol import Cancelled, Listener, PromptRows, Rollout, Sampling
from services.actor.rollout.sampling import sample_tokens, uniforms
from splitppo.batch import Array, Column

# Ended rows leave the batch once they are this share of it: that copies the cache of the others, which costs about as
# much as decoding one more token.
_LEAVING_SHARE = 1 / 8


class HfRollout:
    """Samples with the policy's own module.

    Args:
        gathered: context manager that yields the module with whole (unsharded) weights, in evaluation mode; entering
            it is collective.
        stop_token_ids: each of them ends a response; empty: all responses have the maximal length.
        max_batch_size: rows decoded together.
        device: where the module computes.
    """

    def __init__(
        self,
        gathered: Callable[[], AbstractContextManager[nn.Module]],
        *,
        stop_token_ids: Iterable[int],
        max_batch_size: int,
        device: torch.device,
    ) -> None:
        self._gathered = gathered
        self._stop_tokens = torch.tensor(sorted(set(stop_token_ids)), dtype=torch.int64, device=device)
        self._max_batch_size = max_batch_size
        self._device = device
        self._policy_version: int | None = None

    @property
    def policy_version(self) -> int | None:
        """See `RolloutBackend.policy_version`."""
        return self._policy_version

    def sync_weights(self, version: int) -> None:
        """Notes the version: generation reads the policy's own weights."""
        self._policy_version = version

    def sleep(self) -> None:
        """Nothing to do: a KV cache lives as long as its `generate`."""

    @torch.no_grad()
    def generate(self, rows: PromptRows, sampling: Sampling, listener: Listener) -> Rollout:
        """See `RolloutBackend.generate`; groups end in ascending order.

        Raises:
            Cancelled: the listener is.
            FloatingPointError: the policy gives a sampled token no finite log-prob.
        """
        prompt_of_row = np.repeat(np.arange(len(rows.prompts)), [len(own) for own in rows.seeds])
        seed_of_row = np.concatenate([*rows.seeds, np.empty(0, np.int64)])
        group_of_row = rows.groups[prompt_of_row]
        # Group after group; in one, rows of similar prompt length go together, so that little is padded.
        lengths = np.array([len(prompt) for prompt in rows.prompts], dtype=np.int64)
        order = np.lexsort((lengths[prompt_of_row], group_of_row))
        chunks = [order[start : start + self._max_batch_size] for start in range(0, len(order), self._max_batch_size)]
        positions = _Positions(listener, len(chunks), sampling.max_response_length)
        tokens: list[Array] = [np.empty(0, np.int32)] * len(order)
        log_probs: list[Array] = [np.empty(0, np.float32)] * len(order)
        open_rows = {int(group): int((group_of_row == group).sum()) for group in np.unique(rows.groups)}
        with self._gathered() as model:
            for chunk in chunks:
                unique, index = np.unique(prompt_of_row[chunk], return_inverse=True)
                decoded = _DecodedRows(model, [rows.prompts[row] for row in unique], index, sampling, self._device)
                seeds_R = torch.from_numpy(seed_of_row[chunk]).to(self._device)
                for row, *response in zip(chunk, *self._decode(decoded, seeds_R, sampling, positions), strict=True):
                    tokens[row], log_probs[row] = response
                positions.finish_chunk()
                for group in np.unique(group_of_row[chunk]).tolist():
                    open_rows[group] -= int((group_of_row[chunk] == group).sum())
                    if not open_rows[group]:
                        own = np.flatnonzero(group_of_row == group)
                        listener.group_ended(group, _rollout([tokens[i] for i in own], [log_probs[i] for i in own]))
        return _rollout(tokens, log_probs)

    def _decode(
        self, rows: _DecodedRows, seeds_R: Tensor, sampling: Sampling, positions: _Positions
    ) -> tuple[list[Array], list[Array]]:
        """Samples until every row has ended; token ids and log-probs of each row."""
        num_rows, length = len(seeds_R), sampling.max_response_length
        uniforms_RT = uniforms(seeds_R, length)
        tokens_RT = torch.zeros(num_rows, length, dtype=torch.int64, device=self._device)
        log_probs_RT = torch.zeros(num_rows, length, dtype=torch.float32, device=self._device)
        lengths_R = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        # The rows still in the batch; what an ended one samples lies past its length and is cut off at the end.
        batch = torch.arange(num_rows, device=self._device)
        alive = torch.ones(num_rows, dtype=torch.bool, device=self._device)
        for position in range(length):
            tokens, log_probs = sample_tokens(rows.logits, uniforms_RT[batch, position], sampling)
            tokens_RT[batch, position], log_probs_RT[batch, position] = tokens, log_probs
            lengths_R[batch] += alive
            alive &= ~torch.isin(tokens, self._stop_tokens)
            positions.advance()
            num_alive = int(alive.sum())
            if num_alive == 0 or position + 1 == length:
                break
            if len(batch) - num_alive >= len(batch) * _LEAVING_SHARE:
                kept = alive.nonzero().squeeze(-1)
                batch, tokens, alive = batch[kept], tokens[kept], alive[kept]
                rows.keep(kept)
            rows.append(tokens)
        return _trim(tokens_RT, lengths_R), _trim(log_probs_RT, lengths_R, finite=True)


class _DecodedRows:
    """Rows whose next token is due: their KV cache, and the logits of that token.

    Attributes:
        logits: [R, V] of each row's next token.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Array],
        prompt_of_row: NDArray[np.int64],
        sampling: Sampling,
        device: torch.device,
    ) -> None:
        lengths = np.array([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        mask = np.arange(width) >= width - lengths[:, None]
        ids = np.zeros(mask.shape, np.int64)
        ids[mask] = np.concatenate(prompts)
        self._model = model
        self._cache = growing_cache(model.config)
        self._width = width
        self._next_positions = torch.from_numpy(lengths).to(device)
        self._mask: Tensor | None = None  # stays None where no row is padded: attention needs no mask then
        if not mask.all():
            whole = np.pad(mask, ((0, 0), (0, sampling.max_response_length)), constant_values=True)
            self._mask = torch.from_numpy(whole.astype(np.int64)).to(device)
        positions_UP = np.maximum(np.arange(width) - (width - lengths[:, None]), 0)
        self.logits = self._forward(torch.from_numpy(ids).to(device), torch.from_numpy(positions_UP).to(device))
        if len(prompt_of_row) != len(prompts) or (prompt_of_row != np.arange(len(prompts))).any():
            self.keep(torch.from_numpy(prompt_of_row).to(device))

    def keep(self, indices: Tensor) -> None:
        """Keeps the rows at `indices`, in that order; a row may be taken several times."""
        self._cache.batch_select_indices(indices)
        self._next_positions = self._next_positions[indices]
        self._mask = None if self._mask is None else self._mask[indices]
        self.logits = self.logits[indices]

    def append(self, tokens_R: Tensor) -> None:
        """Adds one token to each row and computes the logits of the next."""
        self._width += 1
        self.logits = self._forward(tokens_R[:, None], self._next_positions[:, None])
        self._next_positions = self._next_positions + 1

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        outputs: Any = self._model(
            input_ids=ids,
            attention_mask=None if self._mask is None else self._mask[:, : self._width],
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = outputs.logits[:, -1]
        return logits


class _Positions:
    """Decoded token positions over all chunks, for progress; a chunk that ends early counts as whole."""

    def __init__(self, listener: Listener, num_chunks: int, max_length: int) -> None:
        self._listener, self._max_length, self._total = listener, max_length, num_chunks * max_length
        self._finished_chunks = self._in_chunk = 0

    def advance(self) -> None:
        if self._listener.is_cancelled:
            raise Cancelled
        self._in_chunk += 1
        self._listener.progress(self._finished_chunks * self._max_length + self._in_chunk, self._total)

    def finish_chunk(self) -> None:
        self._finished_chunks, self._in_chunk = self._finished_chunks + 1, 0


def _rollout(tokens: Sequence[Array], log_probs: Sequence[Array]) -> Rollout:
    return Rollout(Column.from_rows(tokens, np.dtype(np.int32)), Column.from_rows(log_probs, np.dtype(np.float32)))


def _trim(values_RT: Tensor, lengths_R: Tensor, *, finite: bool = False) -> list[Array]:
    """The first `lengths_R` values of each row, on the CPU."""
    values, lengths = values_RT.cpu().numpy(), lengths_R.cpu().numpy()
    rows = [row[:length] for row, length in zip(values, lengths, strict=True)]
    if finite and not all(np.isfinite(row).all() for row in rows):
        raise FloatingPointError(
            "the policy gives a sampled token no finite log-prob: its weights hold NaN or infinity"
        )
    return rows
