"""Keeps rows with the same images together, so that a rank decodes and computes them once (pure functions)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.batching.packing import MicroBatchLimits, Rows
from splitppo.balance import partition
from splitppo.batch import Batch

# A micro-batch takes at least so many groups of rows with the same images, a rank so many: else they would be uneven.
_GROUPS_OF_MICRO_BATCH = 2
_GROUPS_OF_RANK = 8


def together_for_images(batch: Batch, lengths: NDArray[np.int32], limits: MicroBatchLimits) -> Rows | None:
    """Numbers the rows that should share a micro-batch alike, [num_rows]; None if no row has an image.

    They have the same images, and take at most a part of a micro-batch, or in one with a fixed number of rows all of
    it.
    """
    if "images" not in batch:
        return None
    if limits.max_rows is not None:
        return _in_groups(batch, np.ones(batch.num_rows), limits.max_rows)
    tokens = lengths if limits.packed else _padded(batch, lengths)
    return _in_groups(batch, tokens, limits.max_tokens / _GROUPS_OF_MICRO_BATCH)


def _padded(batch: Batch, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns for each row the length of the longest one with the same images."""
    stored_rows = batch["images"].stored_rows
    longest = np.zeros(stored_rows.max(initial=-1) + 1, np.int32)
    np.maximum.at(longest, stored_rows, lengths)
    return longest[stored_rows]


def partition_rows(batch: Batch, rows: Rows, costs: NDArray[np.float64], num_parts: int) -> list[Rows]:
    """Divides rows of a batch into parts of nearly equal cost, where `costs` [num_rows] are those of all its rows.

    Rows with the same images go to one part if they are few.
    """
    if "images" not in batch:
        return [rows[part] for part in partition(costs[rows], num_parts)]
    own = Batch(len(rows), {"images": batch["images"].take(rows)}, trusted=True)
    groups = _in_groups(own, costs[rows], costs[rows].sum() / (num_parts * _GROUPS_OF_RANK))
    costs_of_groups = np.bincount(groups, weights=costs[rows]).astype(np.float64)
    parts = partition(costs_of_groups, num_parts)
    return [rows[np.isin(groups, part)] for part in parts]


def _in_groups(batch: Batch, sizes: NDArray[Any], largest: float) -> Rows:
    """Numbers rows such that those of a number have the same images, and sizes that add up to at most `largest`.

    A larger row, and one without images, has a number of its own. The numbers are those from 0 on.
    """
    column = batch["images"]
    groups = np.empty(batch.num_rows, np.int64)
    num_groups = 0
    room: dict[int, float] = {}  # by stored row: what its last group, of this number, can still take
    group_of: dict[int, int] = {}
    for row, (stored, has_images) in enumerate(zip(column.stored_rows.tolist(), column.lengths > 0, strict=True)):
        if not has_images or room.get(stored, -1.0) < sizes[row]:
            group_of[stored] = num_groups
            room[stored] = largest
            num_groups += 1
        groups[row] = group_of[stored]
        room[stored] -= float(sizes[row])
    return groups
