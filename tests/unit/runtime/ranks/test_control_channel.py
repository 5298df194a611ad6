"""Batches and commands for other ranks, sent as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from services.runtime.command import CommandCancelled
from services.runtime.ranks.control_channel import LEAVE, NOTHING, ControlChannel, Order, allocate, layout_of
from splitppo.batch import Batch, Column, SharedColumn
from splitppo.columns import COLUMNS
from tests.support.ranks import rank_processes

MIXED = Batch.from_rows(
    prompts=[[1, 2, 3], [], [4]],
    response_mask=[[1], [0, 1], []],
    seeds=[[2**60], [-1], [3]],
    values=[[0.5], [1.5, -2.5], []],
)
IMAGES = Batch.from_rows(prompts=[[1], [2], [3], [4]], images=[[1, 2, 3], [], [4], [1, 2, 3]])


def assert_same(left: Batch, right: Batch) -> None:
    assert left.num_rows == right.num_rows
    assert left.columns.keys() == right.columns.keys()
    for name, column in left.columns.items():
        assert column.lengths.tolist() == right[name].lengths.tolist()
        for row, other in zip(column.rows(), right[name].rows(), strict=True):
            assert row.tobytes() == other.tobytes()
            assert row.dtype == other.dtype
        if isinstance(column, SharedColumn):
            assert column.store.num_rows == len(right[name].rows_in_use)


# Batches that a rank sends as they are: mixed types, no row, empty rows, no column, a strided one, rows that are shared
# (some not in use), every known column.
BATCHES = [
    MIXED,
    Batch.from_rows(prompts=[]),
    Batch.from_rows(prompts=[[], []]),
    Batch(3, {}),
    Batch(1, {"values": Column(np.arange(6, dtype=np.float32)[::2], np.array([3], np.int32))}),
    IMAGES,
    IMAGES.take(np.array([3, 0, 3])),
    IMAGES.between(1, 2),
    Batch.from_rows(prompts=[], images=[]),
    Batch.from_rows(**{name: np.ones((2, 1 if spec.kind == "one_per_row" else 3)) for name, spec in COLUMNS.items()}),
]


@pytest.mark.parametrize("batch", BATCHES)
def test_a_layout_says_the_columns_and_row_lengths_of_a_batch(batch: Batch) -> None:
    allocated = allocate(layout_of(batch))

    assert allocated.num_rows == batch.num_rows
    assert list(allocated.columns) == list(batch.columns)
    for name, column in batch.columns.items():
        assert allocated[name].lengths.tolist() == column.lengths.tolist()
        for values, sent in zip(allocated[name].buffers, column.buffers, strict=True):
            assert (values.dtype, len(values)) == (sent.dtype, len(sent))
            assert values.flags.aligned
            assert values.flags.writeable


def test_a_group_of_one_has_nobody_to_tell() -> None:
    channel = ControlChannel(1)
    channel.announce(Order(0, request=b"x" * 10_000))
    channel.scatter([MIXED])


ORDERS = [
    Order(NOTHING),
    Order(3, request=b"small"),
    Order(65_535, request=b"r" * 100_000),
    Order(LEAVE),
]


def _converse() -> Any:
    channel = ControlChannel(2)
    if dist.get_rank() == 0:
        for order in ORDERS:
            channel.announce(order)
        channel.scatter([MIXED, MIXED.take(np.array([2, 0]))])
        received: list[Any] = [channel.receive(1), channel.receive(1)]
        try:
            channel.receive(1)
        except CommandCancelled as error:
            received.append(str(error))
        return [*received, *(channel.receive(1) for _ in BATCHES)]
    heard = [channel.next_order() for _ in ORDERS]
    rows = channel.receive(0)
    channel.send(None, 0)
    channel.send(rows, 0)
    channel.send_cancelled(0)
    for batch in BATCHES:
        channel.send(batch, 0)
    return heard


@pytest.fixture(scope="module")
def conversation() -> dict[int, Any]:
    """Returns the messages that two ranks have received from each other."""
    with rank_processes(2) as run:
        return dict(enumerate(run(2, _converse)))


def test_orders_of_any_length_arrive_as_they_were_given(conversation: dict[int, Any]) -> None:
    assert conversation[1] == ORDERS


def test_rows_and_the_word_that_there_are_none_come_back(conversation: dict[int, Any]) -> None:
    nothing, rows = conversation[0][:2]
    assert nothing is None
    assert_same(rows, MIXED.take(np.array([2, 0])))


def test_a_rank_can_say_that_it_has_given_up_in_place_of_rows(conversation: dict[int, Any]) -> None:
    assert conversation[0][2] == "rank 1 has given it up"


def test_every_batch_arrives_as_it_was_sent(conversation: dict[int, Any]) -> None:
    for received, sent in zip(conversation[0][3:], BATCHES, strict=True):
        assert_same(received, sent)
