"""Episodes: rows with several contexts, and the segments that they were made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from splitppo.batch import Batch
from tests.support.seeds import shifted


class Segment(NamedTuple):
    """A context, and what was sampled after it; `first`: where that begins among the response tokens of all rows."""

    row: int
    context: np.ndarray
    sampled: np.ndarray
    first: int


class Episodes(NamedTuple):
    """Whole rows as services get them, and each of their segments."""

    batch: Batch
    segments: Sequence[Segment]


def make_episodes(num_contexts: Sequence[int] = (1, 3, 2, 1, 3, 2), *, seed: int = 0, longest: int = 12) -> Episodes:
    """Makes a row with each of these numbers of contexts, all columns of an update, and holes in the mask."""
    rng = np.random.default_rng(shifted(seed))
    segments: list[Segment] = []
    prompts = []
    responses = []
    columns = []
    masks = []
    num_tokens = 0
    for row, number in enumerate(num_contexts):
        parts: list[np.ndarray] = []
        mask: list[np.ndarray] = []
        places: list[int] = []
        for context_number in range(number):
            context = rng.integers(3, 50, rng.integers(1, longest))
            sampled = rng.integers(3, 50, rng.integers(1, longest))
            if context_number:
                places += [sum(map(len, parts)), len(context)]
                parts.append(context)
                mask.append(np.zeros(len(context), bool))
            else:
                prompts.append(context)
            segments.append(Segment(row, context, sampled, num_tokens + sum(map(len, parts))))
            parts.append(sampled)
            mask.append((rng.random(len(sampled)) > 0.2) | (np.arange(len(sampled)) == 0))
        responses.append(np.concatenate(parts))
        masks.append(np.concatenate(mask))
        columns.append(places)
        num_tokens += len(responses[-1])
    lengths = [len(response) for response in responses]

    def per_token(mean: float, spread: float) -> list[np.ndarray]:
        return [rng.normal(mean, spread, length) for length in lengths]

    batch = Batch.from_rows(
        prompts=prompts,
        responses=responses,
        segments=columns,
        response_mask=masks,
        advantages=per_token(0.0, 1.0),
        returns=per_token(0.0, 1.0),
        old_log_probs=per_token(-4.0, 0.5),
        ref_log_probs=per_token(-4.0, 0.5),
        seeds=[[int(rng.integers(2**62))] for _ in lengths],
        mini_batches=[[0] for _ in lengths],
    )
    return Episodes(batch, segments)


def with_privileged_tokens(episodes: Episodes, *, seed: int = 3) -> Episodes:
    """Returns episodes whose rows have privileged tokens, one of them none, as a value model reads their segments."""
    rng = np.random.default_rng(shifted(seed))
    lengths = [0, *rng.integers(1, 9, episodes.batch.num_rows - 1)]
    privileged = [rng.integers(3, 50, length) for length in lengths]
    segments = [
        segment._replace(context=np.concatenate([privileged[segment.row], segment.context]))
        for segment in episodes.segments
    ]
    return Episodes(episodes.batch.merge(Batch.from_rows(privileged_tokens=privileged)), segments)


def each_alone(episodes: Episodes) -> Batch:
    """Returns a row of one context for each segment, with the columns of a critic's update."""
    batch = episodes.batch
    places = list(sampled_tokens(episodes))
    return Batch.from_rows(
        prompts=[segment.context for segment in episodes.segments],
        responses=[segment.sampled for segment in episodes.segments],
        response_mask=[batch["response_mask"].values[own] for own in places],
        returns=[batch["returns"].values[own] for own in places],
    )


def without_segments(batch: Batch) -> Batch:
    """Returns whole rows without the column that says where contexts begin."""
    return batch.select(name for name in batch.columns if name != "segments")


def sampled_tokens(episodes: Episodes) -> Iterator[np.ndarray]:
    """Yields, for each segment, where its sampled tokens are among the response tokens of all rows."""
    for segment in episodes.segments:
        yield np.arange(segment.first, segment.first + len(segment.sampled))
