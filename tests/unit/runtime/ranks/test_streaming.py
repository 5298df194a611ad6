"""Parts of a streamed command, put together from what the ranks report."""

from __future__ import annotations

import numpy as np
import pytest

from services.runtime.ranks.streaming import PartGatherer
from splitppo.batch import Batch
from splitppo.v1 import worker_pb2

# Five rows in two groups; rank 1 works on no row of the second one.
SHARDS = [np.array([1, 3, 4]), np.array([0, 2])]
ROWS = Batch.from_rows(groups=[[0], [0], [0], [1], [1]])


class Delivered(list[tuple[int, list[int], int]]):
    """(part, first response token of each row, version)."""

    def take(self, ready: worker_pb2.PartReady, rows: Batch) -> None:
        self.append((ready.part, [int(row[0]) for row in rows["responses"].rows()], ready.policy_version))


def gatherer() -> tuple[PartGatherer, Delivered]:
    delivered = Delivered()
    return PartGatherer(SHARDS, ROWS, delivered.take), delivered


def responses(*rows: int) -> Batch:
    """Two responses of one token for each row: 10 times the row, and one more."""
    return Batch.from_rows(responses=[[10 * row + sample] for row in rows for sample in range(2)])


def test_a_part_is_delivered_in_the_order_of_the_slot_when_the_last_rank_that_has_rows_of_it_has_reported() -> None:
    parts, delivered = gatherer()
    parts.add(0, 2, responses(3, 4), 7)
    assert delivered == [(2, [30, 31, 40, 41], 7)]
    parts.add(1, 1, responses(0, 2), 7)
    assert parts.missing == [1]
    parts.add(0, 1, responses(1), 7)
    assert delivered[1:] == [(1, [0, 1, 10, 11, 20, 21], 7)]
    assert parts.missing == []


@pytest.mark.parametrize(("rank", "part"), [(1, 2), (0, 3), (0, 0)], ids=["without rows", "unknown", "whole"])
def test_a_part_that_a_rank_was_not_given_is_a_bug(rank: int, part: int) -> None:
    parts, _ = gatherer()
    with pytest.raises(RuntimeError, match=f"rank {rank} has no rows of part {part} left"):
        parts.add(rank, part, responses(3), 0)


def test_a_part_that_is_reported_twice_is_a_bug() -> None:
    parts, _ = gatherer()
    parts.add(1, 1, responses(0, 2), 0)
    with pytest.raises(RuntimeError, match="rank 1 has no rows of part 1 left"):
        parts.add(1, 1, responses(0, 2), 0)


def test_ranks_that_sampled_with_other_weights_are_a_bug() -> None:
    parts, delivered = gatherer()
    parts.add(1, 1, responses(0, 2), 3)
    with pytest.raises(RuntimeError, match=r"part 1 .* versions \[3, 4\]"):
        parts.add(0, 1, responses(1), 4)
    assert not delivered


def test_groups_must_be_numbered_without_gaps() -> None:
    with pytest.raises(RuntimeError, match=r"got \[0, 2\]"):
        PartGatherer(SHARDS, Batch.from_rows(groups=[[0], [0], [0], [2], [2]]), lambda *_: None)
