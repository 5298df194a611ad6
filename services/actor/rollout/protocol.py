"""What the actor asks of an engine that samples responses, whichever it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from splitppo.batch import Array, Column


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn: temperature first, then top-k, then top-p on what is left.

    Attributes:
        temperature: divides the logits; 0 is greedy (top_p and top_k then mean nothing).
        top_p: nucleus, in (0, 1]; 1 keeps every token.
        top_k: most likely tokens kept; 0 keeps every token.
        max_response_length: tokens, at least 1; the stop token counts.

    Raises:
        ValueError: a value lies outside its range.
    """

    temperature: float
    top_p: float
    top_k: int
    max_response_length: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (every token) or positive, got {self.top_k}")
        if self.max_response_length < 1:
            raise ValueError(f"max_response_length must be at least 1, got {self.max_response_length}")


@dataclass(frozen=True)
class Rollout:
    """Sampled responses, ordered by prompt, then sample.

    Attributes:
        responses: token ids, int32; a stop token is the last one of its row and part of it.
        log_probs: float32, one per response token: log-softmax of logits / temperature (greedy: of the logits) before
            top-k and top-p cut it. What the training forward computes for the same token, up to rounding.
    """

    responses: Column
    log_probs: Column


class RolloutBackend(Protocol):
    """Samples responses with the policy's weights. Every rank of the group owns one and calls every method."""

    def sync_weights(self) -> None:
        """Takes over the policy's weights. Collective; called once before `generate` whenever they have changed."""
        ...

    def generate(
        self,
        prompts: Sequence[Array],
        seeds: Sequence[Array],
        sampling: Sampling,
        progress: Callable[[int, int], None],
    ) -> Rollout:
        """Samples one response per seed for this rank's prompts.

        Ranks may hold different numbers of prompts, none included, and finish at different times: an implementation
        may synchronise at the beginning, never between tokens. The same weights, prompts and seeds give the same
        responses.

        Args:
            prompts: token ids, none empty.
            seeds: for each prompt the int64 seeds of its responses.
            sampling: how to draw; the same on every rank.
            progress: told (done, total) in decoded token positions, at every one.
        """
        ...
