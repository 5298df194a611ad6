"""Divides rows of a batch over ranks and micro-batches of nearly equal cost, and responses into streamed parts."""

import heapq
import operator
from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The number of tokens of a row at which attention costs as much as the linear layers.
EQUAL_COST_TOKENS = 4096


def attention_cost(lengths: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Returns the cost of a forward pass for each row, in units of one token through the linear layers.

    cost = L + L^2 / EQUAL_COST_TOKENS
    """
    lengths_f64 = lengths.astype(np.float64)
    return lengths_f64 + lengths_f64**2 / EQUAL_COST_TOKENS


def partition(costs: Sequence[float] | NDArray[np.float64], num_parts: int) -> list[NDArray[np.int64]]:
    """Divides rows into `num_parts` groups of nearly equal total cost (Karmarkar and Karp, 1982).

    The largest differencing method: the two partial partitions that are furthest from balance are combined, the
    heaviest group with the lightest. The result is deterministic; it is a list of arrays of row indices, ascending
    within a group; a group is empty only if there are fewer rows than groups. `costs` are not negative.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    if num_parts == 1:
        return [np.arange(len(costs))]
    in_first_group = np.eye(1, num_parts)[0]  # [1, 0, 0, ...]
    # A heap entry: (-spread, tie-breaker, cost and rows of each group, from the heaviest to the lightest).
    heap = [
        (-float(cost), row, float(cost) * in_first_group, [(row,), *[()] * (num_parts - 1)])
        for row, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    for tie in range(len(heap), 2 * len(heap) - 1):
        _, _, costs_1, rows_1 = heapq.heappop(heap)
        _, _, costs_2, rows_2 = heapq.heappop(heap)
        merged = costs_1 + costs_2[::-1]
        rows = [*map(operator.add, rows_1, reversed(rows_2))]
        are_empty = [not rows_of_group for rows_of_group in rows]
        order = np.lexsort((are_empty, -merged))  # heaviest first; of equally heavy groups, empty ones come last
        spread = merged[order[0]] - merged[order[-1]]
        heapq.heappush(heap, (-float(spread), tie, merged[order], [rows[index] for index in order]))
    groups = [sorted(rows) for rows in heap[0][3]] if heap else [[] for _ in range(num_parts)]
    return [np.array(rows, dtype=np.int64) for rows in _fill_empty(groups, costs)]


def _fill_empty(groups: list[list[int]], costs: Sequence[float] | NDArray[np.float64]) -> list[list[int]]:
    """Gives every empty group the cheapest row of the group with the most rows, if that group has more than one."""
    for group in groups:
        donor = max(groups, key=len)
        if not group and len(donor) > 1:
            row = min(donor, key=lambda index: float(costs[index]))
            donor.remove(row)
            group.append(row)
    return groups


# The largest part, in equal shares: the work on the first part begins while most responses are still to come.
LARGEST_PART = 1.5


def part_ends(num_responses: int, num_parts: int) -> list[int]:
    """Divides the responses of a step into streamed parts; returns the cumulative number of responses of each part.

    A part takes half of the responses that are not in the parts before, but no more than LARGEST_PART equal shares. It
    leaves one response to each part behind it as long as there are enough. The first part is limited so
    that it is complete soon. Later parts are smaller, because few responses are long, and because no generation goes on
    during the work on the last part.
    """
    ends = []
    left = num_responses
    largest = ceil(LARGEST_PART * num_responses / num_parts)
    for num_behind in reversed(range(num_parts)):
        left -= max(min((left + 1) // 2, largest, left - num_behind), min(left, 1)) if num_behind else left
        ends.append(num_responses - left)
    return ends
