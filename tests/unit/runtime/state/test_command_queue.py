"""The command queue: order, bounds, joining, draining."""

from __future__ import annotations

import threading

import pytest

from services.runtime.command import Command, Effect, Outcome
from services.runtime.state.command_call import CommandCall
from services.runtime.state.command_queue import CommandQueue, CommandQueueClosed, draining
from splitppo.rpc.errors import Busy, InvalidArgument, PeerDied, Unavailable
from splitppo.v1 import critic_pb2, worker_pb2
from tests.support.command_calls import result_of

COMMAND = Command("ComputeValues", critic_pb2.ComputeValuesRequest, Effect.WRITES_SLOT, lambda *_: Outcome())
LOAD = Command("LoadCheckpoint", worker_pb2.LoadCheckpointRequest, Effect.LOADS, lambda *_: Outcome())
UPDATE = Command("Update", critic_pb2.CriticUpdateRequest, Effect.TRAINS, lambda *_: Outcome())
DIGEST = Command("ComputeWeightsDigest", worker_pb2.ComputeWeightsDigestRequest, Effect.READS, lambda *_: Outcome())
SAVE = Command("SaveCheckpoint", worker_pb2.SaveCheckpointRequest, Effect.SAVES, lambda *_: Outcome())


def call(request_id: str, command: Command = COMMAND, base_step: int = 0) -> CommandCall:
    header = worker_pb2.CommandHeader(request_id=request_id, base_step=base_step)
    return CommandCall(command, command.request_type(header=header))


def no_reply(_: CommandCall) -> None:
    return None


def test_calls_leave_in_the_order_of_their_arrival() -> None:
    command_queue = CommandQueue(3)
    for name in "abc":
        command_queue.admit(call(name), no_reply)
    taken = [command_queue.take(0.0) for _ in range(3)]
    assert [command.request_id for command in taken if command] == ["a", "b", "c"]


def test_a_full_queue_refuses() -> None:
    command_queue = CommandQueue(1)
    command_queue.admit(call("a"), no_reply)
    with pytest.raises(Busy, match="max_queued_commands"):
        command_queue.admit(call("b"), no_reply)


def test_the_running_call_takes_no_room() -> None:
    command_queue = CommandQueue(1)
    command_queue.admit(call("a"), no_reply)
    command_queue.take(0.0)
    command_queue.admit(call("b"), no_reply)
    assert command_queue.num_queued == 1


def test_the_same_request_joins_the_open_call() -> None:
    command_queue = CommandQueue(1)
    first = command_queue.admit(call("a"), no_reply)
    assert command_queue.admit(call("a"), no_reply) is first
    command_queue.take(0.0)
    assert command_queue.admit(call("a"), no_reply) is first
    assert command_queue.num_queued == 0


@pytest.mark.parametrize("other", [call("a", base_step=1), call("a", UPDATE)])
def test_a_request_id_belongs_to_one_request(other: CommandCall) -> None:
    command_queue = CommandQueue(2)
    command_queue.admit(call("a"), no_reply)
    with pytest.raises(InvalidArgument, match="belongs to another"):
        command_queue.admit(other, no_reply)


def test_a_finished_request_gets_its_stored_reply() -> None:
    command_queue = CommandQueue(1)
    command_queue.admit(call("a"), no_reply).resolve(worker_pb2.CommandResult())
    stored = worker_pb2.CommandResult(replayed=True)
    assert result_of(command_queue.admit(call("a"), lambda _: stored)) == stored


def test_a_failed_request_may_be_tried_again() -> None:
    command_queue = CommandQueue(2)
    first = command_queue.admit(call("a"), no_reply)
    command_queue.take(0.0)
    first.fail(InvalidArgument("no"))
    assert command_queue.admit(call("a"), no_reply) is not first


def test_taking_from_an_empty_queue_gives_nothing_after_the_timeout() -> None:
    assert CommandQueue(1).take(0.0) is None


def test_taking_waits_for_a_call() -> None:
    command_queue = CommandQueue(1)
    taken: list[CommandCall | None] = []
    taker = threading.Thread(target=lambda: taken.append(command_queue.take(30.0)))
    taker.start()
    arrived = command_queue.admit(call("a"), no_reply)
    taker.join(30.0)
    assert taken == [arrived]


def test_draining_refuses_what_has_not_begun_and_lets_the_rest_finish() -> None:
    command_queue = CommandQueue(3)
    running, queued = (command_queue.admit(call(name), no_reply) for name in "ab")
    command_queue.take(0.0)
    command_queue.close(draining())
    with pytest.raises(Unavailable, match="draining"):
        result_of(queued)
    with pytest.raises(Unavailable, match="draining"):
        command_queue.admit(call("c"), no_reply)
    assert not running.answered.is_set()
    assert command_queue.admit(call("a"), no_reply) is running
    with pytest.raises(CommandQueueClosed):
        command_queue.take(0.0)


def running(command_queue: CommandQueue, command: Command) -> CommandCall:
    command_queue.admit(call("running", command), no_reply)
    taken = command_queue.take(0.0)
    assert taken is not None
    return taken


def test_a_call_that_loads_weights_comes_next_even_into_a_full_queue() -> None:
    command_queue = CommandQueue(1)
    generating = running(command_queue, COMMAND)
    queued = command_queue.admit(call("queued", UPDATE), no_reply)
    load = command_queue.admit(call("load", LOAD), no_reply)
    assert generating.cancelled_because == "other weights are being loaded"
    with pytest.raises(Unavailable, match="other weights are being loaded"):
        result_of(queued)
    assert not load.answered.is_set()
    assert command_queue.take(0.0) is load


def test_loads_do_not_refuse_each_other() -> None:
    command_queue = CommandQueue(2)
    first, second = (command_queue.admit(call(name, LOAD), no_reply) for name in "ab")
    assert [command_queue.take(0.0), command_queue.take(0.0)] == [first, second]


def test_a_newer_controller_finds_an_empty_queue() -> None:
    command_queue = CommandQueue(2)
    generating = running(command_queue, COMMAND)
    queued = command_queue.admit(call("queued"), no_reply)
    command_queue.supersede("a newer controller has taken over")
    assert generating.cancelled_because == "a newer controller has taken over"
    with pytest.raises(Unavailable, match="a newer controller"):
        result_of(queued)
    assert command_queue.num_queued == 0


@pytest.mark.parametrize("command", [UPDATE, LOAD, DIGEST, SAVE], ids=lambda command: command.effect.name)
def test_a_command_that_does_not_only_write_its_slot_is_never_cancelled(command: Command) -> None:
    command_queue = CommandQueue(2)
    going_on = running(command_queue, command)
    command_queue.supersede("a newer controller has taken over")
    command_queue.admit(call("load", LOAD), no_reply)
    assert going_on.cancelled_because == ""


@pytest.mark.parametrize("is_early", [True, False])
def test_the_ranks_are_told_once_of_a_cancelled_call_whenever_it_happens(is_early: bool) -> None:
    command, reasons = call("a", COMMAND), []
    if is_early:
        command.cancel("first")
    command.on_cancel(lambda: reasons.append(command.cancelled_because))
    command.cancel("first")
    command.cancel("second")
    assert reasons == ["first"]


def test_a_call_that_is_answered_is_not_cancelled_any_more() -> None:
    command = call("a", COMMAND)
    command.resolve(worker_pb2.CommandResult())
    command.cancel("too late")
    assert command.cancelled_because == ""


def test_the_log_of_a_call_grows_and_is_read_from_any_index() -> None:
    command = call("a")
    events, more = command.read(0)
    assert (events, more.done()) == ([], False)
    for part in (2, 1):
        command.announce(worker_pb2.CommandEvent(part=worker_pb2.PartReady(part=part, num_parts=2)))
    assert more.done()
    assert [event.part.part for event in command.read(0)[0]] == [2, 1]
    assert [event.part.part for event in command.read(1)[0]] == [1]


def test_everything_open_hears_why_the_group_ends() -> None:
    command_queue = CommandQueue(3)
    calls = [command_queue.admit(call(name), no_reply) for name in "ab"]
    command_queue.take(0.0)
    command_queue.fail_open(PeerDied("rank 1 died"))
    for command in calls:
        with pytest.raises(PeerDied, match="rank 1 died"):
            result_of(command)


def test_an_answer_that_was_given_stands() -> None:
    command = call("a")
    command.resolve(worker_pb2.CommandResult(committed_step=1))
    command.fail(PeerDied("too late"))
    assert result_of(command).committed_step == 1


def test_progress_is_told_at_new_phases_and_at_the_end_and_the_rest_now_and_then() -> None:
    command = call("a")
    for done in range(1000):
        command.report(done, 2000, "forward")
    command.report(0, 10, "backward")
    command.report(10, 10, "backward")
    reports = [event.progress for event in command.read(0)[0]]
    assert reports[0] == worker_pb2.Progress(done=0, total=2000, phase="forward")
    assert [progress.phase for progress in reports[-2:]] == ["backward"] * 2
    assert len(reports) < 100
    assert command.progress == reports[-1] == worker_pb2.Progress(done=10, total=10, phase="backward")


def test_nothing_is_told_after_the_answer() -> None:
    command = call("a")
    command.resolve(worker_pb2.CommandResult())
    _, more = command.read(0)
    command.announce(worker_pb2.CommandEvent(part=worker_pb2.PartReady(part=1, num_parts=2)))
    command.report(1, 2, "late")
    assert (len(command.read(0)[0]), more.done()) == (1, False)


def test_progress_beyond_its_total_does_not_fill_the_log_and_the_newest_is_known() -> None:
    command = call("a")
    for done in range(10_000):
        command.report(min(done, 10), 10, "generate")
    command.report(3, 10, "generate")
    assert len(command.read(0)[0]) < 1_000
    assert command.progress == worker_pb2.Progress(done=3, total=10, phase="generate")
