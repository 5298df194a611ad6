"""Rollout on the trained model itself: batched decoding over any Hugging Face causal LM's forward with a KV cache.

Needs no second copy of the weights and no second engine. Rows wait in the order of their groups, prompts and samples;
one that has ended makes place for the next, and once none waits it leaves.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import ceil, isfinite

import numpy as np
import torch
from torch import Tensor, nn

from services.actor.rollout.decoding import DecodedRows
from services.actor.rollout.grouped_attention import grouped_attention
from services.actor.rollout.protocol import Cancelled, Listener, PromptRows, Rollout, Sampling
from services.actor.rollout.sampling import sample_tokens, uniforms
from services.actor.rollout.stopping import StopRule, StopWatch
from splitppo.batch import Array, Column

# Ended rows leave or are replaced once they are this share of the batch: the one copies the cache of the others, the
# other is a forward of its own, and both cost about as much as decoding one more token.
_ENDED_SHARE = 1 / 8


class HfRollout:
    """Samples with the policy's own module.

    Args:
        gathered: context manager that yields the module with whole (unsharded) weights, in evaluation mode; entering
            it is collective.
        stop_rule: what ends a response before its maximal length.
        max_batch_size: rows decoded together.
        device: where the module computes.
    """

    def __init__(
        self,
        gathered: Callable[[], AbstractContextManager[nn.Module]],
        *,
        stop_rule: StopRule,
        max_batch_size: int,
        device: torch.device,
    ) -> None:
        self._gathered = gathered
        self._stop_rule = stop_rule
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

    def check_request(self, sampling: Sampling, num_tokens: int) -> None:
        """Nothing to refuse beyond what the model itself cannot do."""

    def sleep(self) -> None:
        """Nothing to do: a KV cache lives as long as its `generate`."""

    @torch.no_grad()
    def generate(self, rows: PromptRows, sampling: Sampling, listener: Listener) -> Rollout:
        """See `RolloutBackend.generate`.

        Raises:
            Cancelled: the listener is.
            FloatingPointError: the policy gives a sampled token no finite log-prob.
        """
        responses = _Responses(self._begin(rows), sampling.max_response_length, listener)
        waiting = deque(responses.rows)
        with self._gathered() as model, grouped_attention(model):
            while waiting:
                self._decode(model, waiting, sampling, responses)
        return responses.rollout()

    def _begin(self, rows: PromptRows) -> list[_Row]:
        prompts = zip(rows.prompts, rows.seeds, rows.groups.tolist(), strict=True)
        return [
            _Row(prompt, seed, group, self._stop_rule.begin(prompt))
            for prompt, seeds, group in prompts
            for seed in seeds.tolist()
        ]

    def _decode(self, model: nn.Module, waiting: deque[_Row], sampling: Sampling, responses: _Responses) -> None:
        """Decodes rows from the front of the queue until none is open; the queue is then empty, or the model's cache
        takes no new rows beside others.
        """

        def prefill(rows: Sequence[_Row]) -> DecodedRows:
            return DecodedRows(model, [row.prompt for row in rows], self._device)

        batch = _take(waiting, self._max_batch_size)
        decoded = prefill(batch)
        while True:
            tokens_R, log_probs_R = sample_tokens(decoded.logits, self._uniforms(batch), sampling)
            responses.add(batch, tokens_R.tolist(), log_probs_R.tolist())
            ended = [place for place, row in enumerate(batch) if row.has_ended]
            if len(ended) == len(batch):
                return
            if not (waiting and decoded.can_join):
                if len(ended) >= len(batch) * _ENDED_SHARE:
                    kept = [place for place, row in enumerate(batch) if not row.has_ended]
                    decoded.keep(kept)
                    batch, tokens_R = [batch[place] for place in kept], tokens_R[kept]
                decoded.append(tokens_R)
                continue
            decoded.append(tokens_R)
            if len(ended) >= min(len(waiting), ceil(len(batch) * _ENDED_SHARE)):
                new = _take(waiting, len(ended))
                places = ended[: len(new)]
                decoded.put(places, prefill(new))
                for place, row in zip(places, new, strict=True):
                    batch[place] = row

    def _uniforms(self, batch: Sequence[_Row]) -> Tensor:
        """[R], of each row's next position."""
        seeds_and_positions = torch.tensor([(row.seed, len(row.tokens)) for row in batch], device=self._device)
        return uniforms(*seeds_and_positions.unbind(1))


@dataclass(eq=False)
class _Row:
    """A response in the making."""

    prompt: Array
    seed: int
    group: int
    stop: StopWatch
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    has_ended: bool = False


class _Responses:
    """All responses of a `generate`, and what its listener hears of them.

    Attributes:
        rows: in the order in which they are decoded: groups are ascending.
    """

    def __init__(self, rows: Sequence[_Row], max_length: int, listener: Listener) -> None:
        self.rows = rows
        self._max_length, self._listener = max_length, listener
        self._num_open = Counter(row.group for row in rows)
        self._num_decoded = 0

    def add(self, batch: Sequence[_Row], tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Adds a token to each row of the batch that has not ended."""
        if self._listener.is_cancelled:
            raise Cancelled
        for row, token, log_prob in zip(batch, tokens, log_probs, strict=True):
            if not row.has_ended:
                self._add(row, token, log_prob)
        self._listener.progress(self._num_decoded, len(self.rows) * self._max_length)

    def rollout(self, group: int | None = None) -> Rollout:
        """The responses to the prompts of a group, or all."""
        rows = [row for row in self.rows if group is None or row.group == group]
        tokens = Column.from_rows([row.tokens for row in rows], np.dtype(np.int32))
        return Rollout(tokens, Column.from_rows([row.log_probs for row in rows], np.dtype(np.float32)))

    def _add(self, row: _Row, token: int, log_prob: float) -> None:
        if not isfinite(log_prob):
            raise FloatingPointError(
                "the policy gives a sampled token no finite log-prob: its weights hold NaN or infinity"
            )
        row.tokens.append(token)
        row.log_probs.append(log_prob)
        self._num_decoded += 1
        if row.stop.ends_with(token) or len(row.tokens) == self._max_length:
            row.has_ended = True
            self._num_decoded += self._max_length - len(row.tokens)  # an early end leaves nothing to wait for
            self._num_open[row.group] -= 1
            if not self._num_open[row.group]:
                self._listener.group_ended(row.group, self.rollout(row.group))


def _take(waiting: deque[_Row], num_rows: int) -> list[_Row]:
    return [waiting.popleft() for _ in range(min(num_rows, len(waiting)))]
