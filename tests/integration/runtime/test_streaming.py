"""A streamed command on two ranks: its parts, and its cancellation."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from splitppo.rpc.errors import NotFound, PeerDied, StaleEpoch, Unavailable
from splitppo.v1 import batch_pb2, worker_pb2
from tests.integration.runtime import toy
from tests.integration.runtime.client import Client, error_of, experience, progress, result, wire_errors
from tests.integration.runtime.conftest import StartToy, Toy
from tests.support.groups import wait_until

PROMPTS = [[toy.STREAM, row] for row in range(7)]
RESPONSES = [[row] * (1 + row % 3) for row in range(7)]
VALUES = toy.values_of(PROMPTS, RESPONSES)
ROWS_OF_PART = toy.ROWS_OF_PART


@pytest.fixture(scope="module")
def module_two(start_module_toy: StartToy) -> Toy:
    return start_module_toy(2)


@pytest.fixture
def two(module_two: Toy) -> Iterator[Toy]:
    """The shared group; idle afterwards."""
    tidy(module_two)
    yield module_two
    wait_until(lambda: module_two.client.status().state == worker_pb2.WORKER_STATE_IDLE, what="idle again")


def tidy(running: Toy) -> None:
    """Removes what the tests before have left in the run folder."""
    for file in [*running.run_dir.glob("part_*"), *running.run_dir.glob("cancelled_*")]:
        file.unlink()


def part_slot(part: int) -> batch_pb2.Slot:
    return batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1, part=part)


def start(client: Client, *, request_id: str = "") -> Any:
    """A streamed command that has begun."""
    client.put(experience(1), prompts=PROMPTS, responses=RESPONSES)
    stream = client.compute_values(experience(1), base_step=0, request_id=request_id)
    assert progress(stream).phase == "streaming"
    return stream


def let_end(running: Toy, *parts: int) -> None:
    for part in parts:
        (running.run_dir / f"part_{part}").touch()


def next_part(stream: Any) -> worker_pb2.PartReady:
    with wire_errors():
        return next(event.part for event in stream if event.WhichOneof("event") == "part")


def cancelled_ranks(running: Toy) -> list[str]:
    return sorted(file.name for file in running.run_dir.glob("cancelled_*"))


def assert_part(client: Client, part: int) -> None:
    rows = client.get(part_slot(part), "values", "places")
    assert rows["places"].values.tolist() == ROWS_OF_PART[part]
    values = rows["values"]
    expected = VALUES.take(np.array(ROWS_OF_PART[part]))
    assert values.values.tolist() == expected.values.tolist()
    assert values.lengths.tolist() == expected.lengths.tolist()


def test_parts_are_there_while_the_others_are_still_worked_on_in_any_order(two: Toy) -> None:
    client = two.client
    stream = start(client, request_id="streamed")
    let_end(two, 2)
    assert next_part(stream) == worker_pb2.PartReady(part=2, num_parts=3, policy_version=7)
    assert_part(client, 2)
    with pytest.raises(NotFound):
        client.get(part_slot(1), "values")
    joined = client.compute_values(experience(1), base_step=0, request_id="streamed")
    assert next_part(joined).part == 2
    let_end(two, 1, 3)
    assert {next_part(stream).part, next_part(stream).part} == {1, 3}
    reply = result(joined)
    assert reply.policy_version == 7
    assert result(stream) == reply
    for part in ROWS_OF_PART:
        assert_part(client, part)
    assert client.get(experience(1), "values")["values"].values.tolist() == VALUES.values.tolist()


def test_a_checkpoint_that_is_to_be_loaded_cancels_what_streams_on_every_rank(two: Toy) -> None:
    client = two.client
    stream = start(client)
    let_end(two, 1)
    assert next_part(stream).part == 1
    queued = client.compute_values(experience(1), base_step=0)
    wait_until(lambda: client.status().queued_commands == 1, what="a command queued")
    loading = client.load(0, base_step=0)
    for refused in (stream, queued):
        error = error_of(refused)
        assert isinstance(error, Unavailable)
        assert "other weights are being loaded" in error.message
    assert result(loading).committed_step == 0
    assert cancelled_ranks(two) == ["cancelled_0", "cancelled_1"]
    assert not client.status().slots


def test_a_newer_controller_cancels_the_work_of_the_older_one_and_nothing_of_it_is_kept(two: Toy) -> None:
    stream = start(two.client)
    let_end(two, 3)
    assert next_part(stream).part == 3
    newer = two.another_client(epoch=two.client.epoch + 1)
    with contextlib.closing(newer):
        newer.handshake()
        error = error_of(stream)
        assert isinstance(error, Unavailable)
        assert "cancelled: a newer controller has taken over" in error.message
        assert newer.status().slots == [experience(1)]
        with pytest.raises(NotFound):
            newer.get(part_slot(3), "values")
        assert isinstance(error_of(two.client.compute_values(experience(1), base_step=0)), StaleEpoch)
        two.client.epoch = newer.epoch
        let_end(two, 1, 2)
        result(newer.compute_values(experience(1), base_step=0))
        assert_part(newer, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_command_that_one_rank_has_finished_and_another_gave_up_is_cancelled_as_a_whole(two: Toy, rank: int) -> None:
    client, orders = two.client, [[toy.CANCEL_ON_RANK + rank]] * 2
    result(client.load(0, base_step=0))
    client.put(experience(1), prompts=orders, responses=[[1], [2]])
    stream = client.compute_values(experience(1), base_step=0)
    assert progress(stream).phase == "waiting"
    result(client.load(0, base_step=0))
    assert isinstance(error_of(stream), Unavailable)
    assert cancelled_ranks(two) == [f"cancelled_{rank}"]


def test_a_cancelled_command_can_be_asked_for_again(two: Toy) -> None:
    client = two.client
    stream = start(client, request_id="again")
    result(client.load(0, base_step=0))
    assert isinstance(error_of(stream), Unavailable)
    let_end(two, 1, 2, 3)
    stream = start(client, request_id="again")
    assert sorted(next_part(stream).part for _ in range(3)) == [1, 2, 3]
    result(stream)


def test_sigterm_cancels_what_streams_and_drains_both_ranks(module_two: Toy) -> None:
    """Last of those that share the group: it ends here."""
    tidy(module_two)
    stream = start(module_two.client)
    module_two.group.process.send_signal(signal.SIGTERM)
    error = error_of(stream)
    assert isinstance(error, Unavailable)
    assert "the command was cancelled: the service is draining" in error.message
    module_two.group.wait_ended()
    assert cancelled_ranks(module_two) == ["cancelled_0", "cancelled_1"]


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.extended)])
def test_a_rank_that_is_killed_while_it_streams_ends_the_group(start_toy: StartToy, rank: int) -> None:
    killed = start_toy(2)
    stream = start(killed.client)
    let_end(killed, 1)
    assert next_part(stream).part == 1
    killed.group.kill_rank(rank)
    error = error_of(stream)
    if rank == 1:
        assert isinstance(error, PeerDied)
        assert "a peer rank died: rank 1" in str(error)
    assert killed.group.wait_ended() != 0
