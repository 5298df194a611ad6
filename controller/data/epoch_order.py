"""The order of the prompts of an epoch: a function of seed and epoch."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def quotas(weights: Sequence[float], num_prompts: int) -> list[int]:
    """Returns each weight's share of `num_prompts`, rounded by largest remainder; the sum is exact."""
    shares = np.asarray(weights, np.float64) / np.sum(weights) * num_prompts
    counts = np.floor(shares).astype(np.int64)
    missing = num_prompts - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[:missing]] += 1
    return [int(count) for count in counts]


@lru_cache(maxsize=2)
def epoch_order(num_prompts: int, seed: int, epoch: int, *, shuffle: bool) -> Indices:
    """Every prompt once."""
    return _permutation(num_prompts, seed, epoch) if shuffle else np.arange(num_prompts)


@lru_cache(maxsize=2)
def mixed_order(
    file_sizes: tuple[int, ...], file_quotas: tuple[int, ...], seed: int, epoch: int, *, shuffle: bool
) -> Indices:
    """`file_quotas[f]` prompts of each file f, whose prompts follow those of file f - 1 in the table.

    A file goes through its own prompts again and again, across epochs: none comes twice before each came once.
    Shuffled, every such pass has an order of its own, and so has the epoch; else the files take turns, evenly.
    """
    drawn, turns, start = [], [], 0
    for file, (size, quota) in enumerate(zip(file_sizes, file_quotas, strict=True)):
        places = np.arange(epoch * quota, (epoch + 1) * quota)
        passes, within = np.divmod(places, size)
        for number in np.unique(passes):
            order = _permutation(size, seed, int(number), 1 + file) if shuffle else np.arange(size)
            drawn.append(start + order[within[passes == number]])
        turns.append((np.arange(quota) + 0.5) / quota)
        start += size
    mixed: Indices = np.concatenate(drawn)
    if shuffle:
        return mixed[_permutation(len(mixed), seed, epoch)]
    return mixed[np.argsort(np.concatenate(turns), kind="stable")]


def _permutation(num_prompts: int, *key: int) -> Indices:
    """Sorts raw generator output, which numpy keeps stable across its versions."""
    return np.argsort(np.random.PCG64(list(key)).random_raw(num_prompts), kind="stable")
