"""What the actor asks of an engine that samples responses, whichever it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from splitppo.batch import Array, Column
from splitppo.config.schema import MIN_TEMPERATURE


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn: temperature first, then top-k, then top-p on what is left.

    Attributes:
        temperature: divides the logits, at least MIN_TEMPERATURE as a float32, in which it travels; 0 is greedy (top_p
            and top_k then mean nothing).
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
        if self.temperature != 0.0 and not np.float32(MIN_TEMPERATURE) <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, and finite, got {self.temperature:g}"
            )
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


@dataclass(frozen=True)
class PromptRows:
    """What one rank samples for.

    Attributes:
        prompts: token ids, none empty.
        seeds: for each prompt the int64 seeds of its responses.
        groups: [num_prompts] int, ascending: the group of each prompt, for streaming; all 0 where nothing is streamed.
    """

    prompts: Sequence[Array]
    seeds: Sequence[Array]
    groups: NDArray[np.int64]


class Listener(Protocol):
    """What an engine tells while it samples, and is told."""

    def progress(self, done: int, total: int) -> None:
        """Decoded token positions, at every one."""
        ...

    def group_ended(self, group: int, rollout: Rollout) -> None:
        """All of this rank's responses to the prompts of a group, as soon as the last one has ended.

        Called once for each group that the rank has prompts of, in any order, before `generate` returns.
        """
        ...

    @property
    def is_cancelled(self) -> bool:
        """True from the moment on when nobody wants the responses any more; asked at token boundaries."""
        ...


class Cancelled(Exception):
    """`generate` ended early because its listener is cancelled; the engine can be used again."""


class RolloutBackend(Protocol):
    """Samples responses with the policy's weights. Every rank of the group owns one and calls every method."""

    @property
    def policy_version(self) -> int | None:
        """The step whose weights it samples with; None before the first `sync_weights`."""
        ...

    def sync_weights(self, version: int) -> None:
        """Takes over the policy's weights, which are those of step `version`. Collective; called once before `generate`
        whenever they have changed.
        """
        ...

    def sleep(self) -> None:
        """Gives back device memory until the next `sync_weights` or `generate`; nothing to do where it sleeps already.

        Called on every rank before anything else computes: log-probs, updates, digests, and what saves and loads.
        """
        ...

    def check_request(self, sampling: Sampling, num_tokens: int) -> None:
        """Whether the engine can sample like this; asked on one rank, before `generate`.

        Args:
            sampling: how to draw.
            num_tokens: of the longest prompt and its longest possible response.

        Raises:
            ValueError: it cannot.
        """
        ...

    def generate(self, rows: PromptRows, sampling: Sampling, listener: Listener) -> Rollout:
        """Samples one response per seed for this rank's prompts.

        Ranks may hold different numbers of prompts, none included, and finish at different times: an implementation
        may synchronise at the beginning, never between tokens (but for ranks that share one engine). The same weights,
        prompts and seeds give the same responses; what is sampled together does not depend on timing.

        Raises:
            Cancelled: the listener is.
        """
        ...
