"""Partitions have every row once, are nearly even, and are the same every time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitppo.balance import attention_cost, partition
from tests.support.seeds import shifted

costs = st.lists(st.floats(0, 1e6), max_size=24)
parts = st.integers(1, 6)


def loads(row_costs: list[float], num_parts: int) -> list[float]:
    return sorted(float(sum(row_costs[row] for row in rows)) for rows in partition(row_costs, num_parts))


@given(costs, parts)
def test_every_row_is_in_exactly_one_group_and_indices_ascend(row_costs: list[float], num_parts: int) -> None:
    groups = partition(row_costs, num_parts)

    assert len(groups) == num_parts
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(row_costs)))
    assert all((np.diff(group) > 0).all() and group.dtype == np.int64 for group in groups)


@given(costs, parts)
def test_a_group_is_empty_only_if_there_are_fewer_rows_than_groups(row_costs: list[float], num_parts: int) -> None:
    empty = sum(len(group) == 0 for group in partition(row_costs, num_parts))

    assert empty == max(0, num_parts - len(row_costs))


@given(costs, parts)
def test_the_same_costs_give_the_same_groups(row_costs: list[float], num_parts: int) -> None:
    first, second = partition(row_costs, num_parts), partition(np.array(row_costs), num_parts)

    assert [group.tolist() for group in first] == [group.tolist() for group in second]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=24), parts)
def test_groups_differ_by_no_more_than_the_costliest_row(row_costs: list[float], num_parts: int) -> None:
    totals = loads(row_costs, num_parts)

    assert totals[-1] - totals[0] <= max(row_costs) * (1 + 1e-9)


def test_the_differencing_method_gives_the_result_of_the_papers_example() -> None:
    # Karmarkar and Karp on {8, 7, 6, 5, 4} in two: differences 8-7, 6-5, 4-1, 3-1 leave 2, so loads 14 and 16.
    assert loads([8.0, 7.0, 6.0, 5.0, 4.0], 2) == [14.0, 16.0]


def test_many_uneven_rows_are_balanced_to_a_percent() -> None:
    lengths = np.random.default_rng(shifted(0)).lognormal(5, 1, 512)

    totals = loads(lengths.tolist(), 8)

    assert totals[-1] / totals[0] < 1.01


def test_no_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="num_parts must be at least 1, got 0"):
        partition([1.0], 0)


def test_attention_costs_a_length_and_its_square() -> None:
    cost = attention_cost(np.array([0, 4096, 100_000], np.int32))

    assert cost.tolist() == [0.0, 2 * 4096, 100_000 + 1e10 / 4096]
