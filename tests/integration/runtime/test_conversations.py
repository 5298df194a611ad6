"""Conversations on two ranks: turns, the replies to them, and what ends a command that waits for replies."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from splitppo.rpc.errors import InvalidArgument, PeerDied, StaleEpoch, Unavailable, WrongState
from splitppo.v1 import batch_pb2, conversation_pb2, worker_pb2
from tests.fuzz.replies import reply
from tests.integration.runtime import toy
from tests.integration.runtime.client import Client, error_of, experience, result, wire_errors
from tests.integration.runtime.conftest import StartToy, Toy
from tests.support.groups import wait_until

NUM_ROWS = 5
EVALUATION = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=0)


@pytest.fixture(scope="module")
def module_two(start_module_toy: StartToy) -> Toy:
    return start_module_toy(2)


@pytest.fixture
def two(module_two: Toy) -> Iterator[Toy]:
    """The shared group; idle afterwards."""
    for file in module_two.run_dir.glob("cancelled_*"):
        file.unlink()
    yield module_two
    wait_until(lambda: module_two.client.status().state == worker_pb2.WORKER_STATE_IDLE, what="idle again")


def start(client: Client, slot: batch_pb2.Slot, **options: Any) -> Any:
    """A command whose conversations wait for replies to their first turns."""
    client.put(slot, prompts=[[1]] * NUM_ROWS)
    stream = client.converse(slot, base_step=0, **options)
    assert turns(stream, NUM_ROWS) == {place: (1, toy.turn_of(place, 1)) for place in range(NUM_ROWS)}
    return stream


def turns(stream: Any, number: int) -> dict[int, tuple[int, list[int]]]:
    """The next turns by place: (number of the turn, tokens)."""
    known: dict[int, tuple[int, list[int]]] = {}
    with wire_errors():
        while len(known) < number:
            known |= {turn.place: (turn.turn, list(turn.tokens)) for turn in next(stream).turns.turns}
    return known


def responses(client: Client, slot: batch_pb2.Slot) -> list[list[int]]:
    return [row.tolist() for row in client.get(slot, "responses")["responses"].rows()]


def last_ones(turn: int) -> list[conversation_pb2.TurnReply]:
    """A reply to this turn of each response that ends the response."""
    return [reply(place, turn, is_last=True) for place in range(NUM_ROWS)]


def test_turns_come_from_all_ranks_and_each_reply_reaches_the_rank_of_its_row(two: Toy) -> None:
    stream = start(two.client, EVALUATION)
    two.client.reply(EVALUATION, reply(3, 1, 103), reply(0, 1, 100, 200))
    assert turns(stream, 2) == {3: (2, [3, 2]), 0: (2, [0, 2])}
    two.client.reply(EVALUATION, reply(3, 1, 9), reply(0, 2, 300), reply(3, 2, is_last=True))
    assert turns(stream, 1) == {0: (3, [0, 3])}
    two.client.reply(EVALUATION, *(reply(place, 1, is_last=True) for place in (1, 2, 4)))
    assert result(stream).policy_version == 7
    assert responses(two.client, EVALUATION) == [
        [0, 1, 100, 200, 0, 2, 300, 0, 3],
        [1, 1],
        [2, 1],
        [3, 1, 103, 3, 2],
        [4, 1],
    ]


def test_a_request_with_an_impossible_reply_changes_nothing(two: Toy) -> None:
    stream = start(two.client, EVALUATION)
    for wrong in (reply(1, 2, 5), reply(NUM_ROWS, 1, 5), reply(1, 1, 1000), reply(1, 1, *[1] * 28), reply(1, 1)):
        with pytest.raises(InvalidArgument):
            two.client.reply(EVALUATION, reply(0, 1, 100), wrong)
    with pytest.raises(WrongState, match="no Generate that takes Reply is running on the experience slot"):
        two.client.reply(experience(1), reply(0, 1, 100))
    two.client.reply(EVALUATION, *last_ones(1))
    result(stream)
    assert responses(two.client, EVALUATION) == [toy.turn_of(place, 1) for place in range(NUM_ROWS)]
    with pytest.raises(WrongState, match="no Generate that takes Reply is running on the evaluation slot of step 0"):
        two.client.reply(EVALUATION, *last_ones(1))


def test_a_client_that_comes_back_gets_all_turns_again_and_the_command_goes_on(two: Toy) -> None:
    client = two.client
    stream = start(client, EVALUATION, request_id="talk")
    client.reply(EVALUATION, reply(0, 1, 100), reply(1, 1, 101))
    turns(stream, 2)
    stream.cancel()

    again = client.converse(EVALUATION, base_step=0, request_id="talk")
    seen = [(turn.place, turn.turn) for _ in range(4) for turn in next(again).turns.turns]
    while len(seen) < NUM_ROWS + 2:
        seen += [(turn.place, turn.turn) for turn in next(again).turns.turns]
    assert sorted(seen) == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (3, 1), (4, 1)]
    client.reply(EVALUATION, *(reply(place, 1, 1) for place in range(NUM_ROWS)))  # two of them once more
    turns(again, 3)
    client.reply(EVALUATION, *last_ones(2))
    result(again)
    assert responses(client, EVALUATION)[:3] == [[0, 1, 100, 0, 2], [1, 1, 101, 1, 2], [2, 1, 1, 2, 2]]


def test_conversations_and_parts_go_together(two: Toy) -> None:
    stream = start(two.client, experience(1), num_parts=2)
    two.client.reply(experience(1), *last_ones(1))
    with wire_errors():
        events = list(stream)
    assert sorted(event.part.part for event in events if event.HasField("part")) == [1, 2]
    first = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1, part=1)
    assert two.client.get(first, "places")["places"].values.tolist() == list(range(NUM_ROWS))


def test_a_checkpoint_that_is_to_be_loaded_cancels_a_command_that_waits_for_replies(two: Toy) -> None:
    stream = start(two.client, EVALUATION)
    two.client.reply(EVALUATION, reply(1, 1, 101))  # may find its rank when that has ended the command
    result(two.client.load(0, base_step=0))
    error = error_of(stream)
    assert isinstance(error, Unavailable)
    assert "other weights are being loaded" in error.message
    with pytest.raises(WrongState):
        two.client.reply(EVALUATION, reply(0, 1, 100))
    assert sorted(file.name for file in two.run_dir.glob("cancelled_*")) == ["cancelled_0", "cancelled_1"]
    stream = start(two.client, EVALUATION)
    two.client.reply(EVALUATION, *last_ones(1))
    result(stream)


def test_a_controller_that_was_replaced_can_reply_no_more(two: Toy) -> None:
    stream = start(two.client, EVALUATION)
    newer = two.another_client(epoch=two.client.epoch + 1)
    with contextlib.closing(newer):
        newer.handshake()
        assert isinstance(error_of(stream), Unavailable)
        with pytest.raises(StaleEpoch):
            two.client.reply(EVALUATION, reply(0, 1, 100))
        two.client.epoch = newer.epoch


def test_sigterm_cancels_a_command_that_waits_for_replies_and_drains_both_ranks(module_two: Toy) -> None:
    """Last of those that share the group: it ends here."""
    stream = start(module_two.client, EVALUATION)
    module_two.group.process.send_signal(signal.SIGTERM)
    error = error_of(stream)
    assert isinstance(error, Unavailable)
    assert "the service is draining" in error.message
    module_two.group.wait_ended()


@pytest.mark.extended
def test_a_rank_that_is_killed_while_it_waits_for_replies_ends_the_group(start_toy: StartToy) -> None:
    killed = start_toy(2)
    stream = start(killed.client, EVALUATION)
    killed.group.kill_rank(1)
    assert isinstance(error_of(stream), PeerDied)
    assert killed.group.wait_ended() != 0
