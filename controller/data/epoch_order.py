"""Computes the order of the prompts in an epoch from seed and epoch alone."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def quotas(weights: Sequence[float], num_prompts: int) -> list[int]:
    """Divides `num_prompts` among files by weight, rounded by largest remainder; the counts add up to `num_prompts`."""
    shares = np.asarray(weights, np.float64) / np.sum(weights) * num_prompts
    counts = np.floor(shares).astype(np.int64)
    missing = num_prompts - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[:missing]] += 1
    return [int(count) for count in counts]


@lru_cache(maxsize=2)
def epoch_order(num_prompts: int, seed: int, epoch: int, *, shuffle: bool) -> Indices:
    """Returns the indices of all prompts, each once, in the order of this epoch."""
    return _permutation(num_prompts, seed, epoch) if shuffle else np.arange(num_prompts)


@lru_cache(maxsize=2)
def mixed_order(
    file_sizes: tuple[int, ...], file_quotas: tuple[int, ...], seed: int, epoch: int, *, shuffle: bool
) -> Indices:
    """Returns the prompt indices of an epoch, in order, with `file_quotas[f]` prompts from each data file f.

    In the table the prompts of file f follow those of file f - 1. A file repeats its prompts in passes, which continue
    over epochs: no prompt comes twice in a pass. With `shuffle` each pass and each epoch has its own random order;
    without, the prompts of all files are interleaved evenly.
    """
    drawn = []
    turns = []
    start = 0
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
    """Returns a random permutation of the prompts that is the same in all versions of numpy.

    The permutation sorts the raw output of a generator, which numpy does not change.
    """
    return np.argsort(np.random.PCG64(list(key)).random_raw(num_prompts), kind="stable")
