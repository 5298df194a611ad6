"""Splitting rows into groups of nearly equal cost: over ranks, and into micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def attention_cost(lengths: NDArray[np.int32], *, quadratic: float = 1.0 / 4096) -> NDArray[np.float64]:
    """Cost of a forward pass per row: L + quadratic * L^2, in units of one token through the linear layers."""
    lengths_f64 = lengths.astype(np.float64)
    return lengths_f64 + quadratic * lengths_f64**2


def partition(costs: Sequence[float] | NDArray[np.float64], num_parts: int) -> list[NDArray[np.int64]]:
    """Partitions rows into `num_parts` groups of nearly equal total cost (Karmarkar and Karp, 1982).

    The largest differencing method: the two partial partitions that are furthest from balance are combined, heaviest
    group with lightest. Deterministic; indices ascend within a group; a group is empty only if there are fewer rows
    than groups.

    Args:
        costs: [num_rows], not negative.
        num_parts: at least 1.

    Returns:
        num_parts index arrays that together hold every row once.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    if num_parts == 1:
        return [np.arange(len(costs))]
    # A heap entry: (-spread, tie-breaker, groups from heaviest to lightest as (cost, rows)).
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = [
        (-float(cost), row, [(float(cost), [row])] + [(0.0, []) for _ in range(num_parts - 1)])
        for row, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    tie = len(heap)
    while len(heap) > 1:
        _, _, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda group: (-group[0], len(group[1]) == 0))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
        tie += 1
    groups = [sorted(rows) for _, rows in heap[0][2]] if heap else [[] for _ in range(num_parts)]
    return [np.array(rows, dtype=np.int64) for rows in _fill_empty(groups, costs)]


def _fill_empty(groups: list[list[int]], costs: Sequence[float] | NDArray[np.float64]) -> list[list[int]]:
    """Gives every empty group the cheapest row of the group that has most rows, while there is one to give."""
    for group in groups:
        donor = max(groups, key=len)
        if not group and len(donor) > 1:
            row = min(donor, key=lambda index: float(costs[index]))
            donor.remove(row)
            group.append(row)
    return groups
