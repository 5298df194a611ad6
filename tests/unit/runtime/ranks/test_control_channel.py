"""Batches and orders as tensors."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from services.runtime.ranks.control_channel import ControlChannel, Order, OrderKind, pack, unpack
from services.runtime.role import CommandCancelled
from splitppo.batch import COLUMN_DTYPES, Batch

GROUP_TIMEOUT_S = 20.0

MIXED = Batch.from_rows(
    prompts=[[1, 2, 3], [], [4]],
    response_mask=[[1], [0, 1], []],
    seeds=[[2**60], [-1], [3]],
    values=[[0.5], [1.5, -2.5], []],
)


def assert_same(left: Batch, right: Batch) -> None:
    assert left.num_rows == right.num_rows
    assert left.columns.keys() == right.columns.keys()
    for name, column in left.columns.items():
        assert column.lengths.tolist() == right[name].lengths.tolist()
        assert column.values.tobytes() == right[name].values.tobytes()
        assert column.values.dtype == right[name].values.dtype


@pytest.mark.parametrize("batch", [MIXED, Batch.from_rows(prompts=[]), Batch.from_rows(prompts=[[], []]), Batch(3, {})])
def test_a_batch_survives_packing(batch: Batch) -> None:
    assert_same(unpack(pack(batch)), batch)


def test_every_column_is_aligned_and_can_be_written_to() -> None:
    received = unpack(pack(MIXED))
    assert all(column.values.flags.aligned and column.values.flags.writeable for column in received.columns.values())


def test_every_known_column_can_travel() -> None:
    batch = Batch.from_rows(**{name: np.ones((2, 3)) for name in COLUMN_DTYPES})
    assert_same(unpack(pack(batch)), batch)


def test_a_group_of_one_has_nobody_to_tell() -> None:
    channel = ControlChannel(0, 1)
    channel.announce(Order(OrderKind.COMMAND, request=b"x" * 10_000))
    channel.scatter([MIXED])


def _member(rank: int, store: str, conversation: Callable[[ControlChannel], Any], answers: Any) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
    )
    answers.put((rank, conversation(ControlChannel(rank, 2))))
    dist.destroy_process_group()


def talk(directory: Path, conversation: Callable[[ControlChannel], Any]) -> dict[int, Any]:
    """What `conversation` returned on each of two ranks, real processes that talk over gloo."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    members = [
        context.Process(target=_member, args=(rank, str(directory / "store"), conversation, answers))
        for rank in range(2)
    ]
    for member in members:
        member.start()
    heard = dict(answers.get(timeout=120) for _ in members)
    for member in members:
        member.join(30)
    return heard


ORDERS = [
    Order(OrderKind.NOTHING),
    Order(OrderKind.COMMAND, command=3, request=b"small"),
    Order(OrderKind.COMMAND, command=65_535, request=b"r" * 512, attachment=b"a" * 100_000),
    Order(OrderKind.COMMAND, attachment=b"only"),
    Order(OrderKind.LEAVE),
]


def _converse(channel: ControlChannel) -> Any:
    if channel.rank == 0:
        for order in ORDERS:
            channel.announce(order)
        channel.scatter([MIXED, MIXED.take(np.array([2, 0]))])
        received: list[Any] = [channel.receive(1), channel.receive(1)]
        try:
            channel.receive(1)
        except CommandCancelled as error:
            received.append(str(error))
        return received
    heard = [channel.next_order() for _ in ORDERS]
    rows = channel.receive(0)
    channel.send(None, 0)
    channel.send(rows, 0)
    channel.send_cancelled(0)
    return heard


@pytest.fixture(scope="module")
def conversation(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What two ranks heard from each other."""
    return talk(tmp_path_factory.mktemp("store"), _converse)


def test_orders_of_any_length_arrive_as_they_were_given(conversation: dict[int, Any]) -> None:
    assert conversation[1] == ORDERS


def test_rows_and_the_word_that_there_are_none_come_back(conversation: dict[int, Any]) -> None:
    nothing, rows, _ = conversation[0]
    assert nothing is None
    assert_same(rows, MIXED.take(np.array([2, 0])))


def test_a_rank_can_say_that_it_has_given_up_in_place_of_rows(conversation: dict[int, Any]) -> None:
    assert conversation[0][2] == "rank 1 has given it up"
