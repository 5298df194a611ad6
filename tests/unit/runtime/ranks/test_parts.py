"""The parts of a streamed command are put together from the reports of the ranks."""

from __future__ import annotations

import pytest

from services.runtime.ranks.parts import PartGatherer
from splitppo.batch import Batch
from splitppo.v1 import worker_pb2


class Delivered(list[tuple[int, list[int], int]]):
    """(part, first response token of each row, version)."""

    def take(self, ready: worker_pb2.PartReady, rows: Batch) -> None:
        assert rows["places"].values.tolist() == sorted(rows["places"].values.tolist())
        self.append((ready.part, [int(row[0]) for row in rows["responses"].rows()], ready.policy_version))


def gatherer() -> tuple[PartGatherer, Delivered]:
    """Two parts of two ranks."""
    delivered = Delivered()
    return PartGatherer(2, 2, delivered.take), delivered


def rows(*places: int) -> Batch:
    """A response for each place: 10 times the place."""
    return Batch.from_rows(responses=[[10 * place] for place in places], places=[[place] for place in places])


def test_a_part_is_delivered_by_ascending_place_when_the_last_rank_has_reported_it() -> None:
    parts, delivered = gatherer()
    parts.add(0, 1, rows(1, 4), 7)
    parts.add(0, 2, rows(3), 7)
    assert parts.missing == [1, 2]
    parts.add(1, 1, rows(0, 2), 7)
    assert delivered == [(1, [0, 10, 20, 40], 7)]
    assert parts.missing == [2]


def test_a_rank_may_have_no_rows_of_a_part() -> None:
    parts, delivered = gatherer()
    parts.add(1, 2, rows(), 7)
    parts.add(0, 2, rows(3, 5), 7)
    parts.add(0, 1, rows(), 7)
    parts.add(1, 1, rows(), 7)
    assert delivered == [(2, [30, 50], 7), (1, [], 7)]
    assert parts.missing == []


@pytest.mark.parametrize("part", [3, 0], ids=["unknown", "whole"])
def test_a_part_that_is_none_is_a_bug(part: int) -> None:
    parts, _ = gatherer()
    with pytest.raises(RuntimeError, match=f"rank 0 has no part {part} left"):
        parts.add(0, part, rows(3), 0)


def test_a_part_that_is_reported_twice_is_a_bug() -> None:
    parts, _ = gatherer()
    parts.add(1, 1, rows(0, 2), 0)
    with pytest.raises(RuntimeError, match="rank 1 has no part 1 left"):
        parts.add(1, 1, rows(0, 2), 0)


def test_ranks_that_sampled_with_other_weights_are_a_bug() -> None:
    parts, delivered = gatherer()
    parts.add(1, 1, rows(0, 2), 3)
    with pytest.raises(RuntimeError, match=r"part 1 .* versions \[3, 4\]"):
        parts.add(0, 1, rows(1), 4)
    assert not delivered
