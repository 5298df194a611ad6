"""The mailbox: order, bounds, joining, draining."""

from __future__ import annotations

import threading

import pytest

from services.shell.commands import Command, Outcome
from services.shell.mailbox import Call, Mailbox, MailboxClosed, draining
from splitppo.rpc.errors import InvalidArgument, PeerDied, QueueFull, Unavailable
from splitppo.v1 import critic_pb2, worker_pb2

COMMAND = Command("ComputeValues", critic_pb2.ComputeValuesRequest, lambda *_: Outcome())
GENERATE = Command("ComputeValues", critic_pb2.ComputeValuesRequest, lambda *_: Outcome(), cancellable=True)
LOAD = Command("LoadCheckpoint", worker_pb2.LoadCheckpointRequest, lambda *_: Outcome(), repairs=True)
UPDATE = Command("Update", critic_pb2.CriticUpdateRequest, lambda *_: Outcome(), commits=True)


def call(request_id: str, command: Command = COMMAND, base_step: int = 0) -> Call:
    header = worker_pb2.CommandHeader(request_id=request_id, base_step=base_step)
    return Call(command, command.request_type(header=header))


def no_reply() -> None:
    return None


def test_calls_leave_in_the_order_of_their_arrival() -> None:
    mailbox = Mailbox(3)
    for name in "abc":
        mailbox.admit(call(name), no_reply)
    taken = [mailbox.take(0.0) for _ in range(3)]
    assert [one.request_id for one in taken if one] == ["a", "b", "c"]


def test_a_full_mailbox_refuses() -> None:
    mailbox = Mailbox(1)
    mailbox.admit(call("a"), no_reply)
    with pytest.raises(QueueFull, match="max_queued_commands"):
        mailbox.admit(call("b"), no_reply)


def test_the_running_call_takes_no_room() -> None:
    mailbox = Mailbox(1)
    mailbox.admit(call("a"), no_reply)
    mailbox.take(0.0)
    mailbox.admit(call("b"), no_reply)
    assert mailbox.num_queued == 1


def test_the_same_request_joins_the_open_call() -> None:
    mailbox = Mailbox(1)
    first = mailbox.admit(call("a"), no_reply)
    assert mailbox.admit(call("a"), no_reply) is first
    mailbox.take(0.0)
    assert mailbox.admit(call("a"), no_reply) is first
    assert mailbox.num_queued == 0


@pytest.mark.parametrize("other", [call("a", base_step=1), call("a", UPDATE)])
def test_a_request_id_belongs_to_one_request(other: Call) -> None:
    mailbox = Mailbox(2)
    mailbox.admit(call("a"), no_reply)
    with pytest.raises(InvalidArgument, match="belongs to another"):
        mailbox.admit(other, no_reply)


def test_a_finished_request_gets_its_stored_reply() -> None:
    mailbox = Mailbox(1)
    mailbox.admit(call("a"), no_reply).resolve(worker_pb2.CommandResult())
    stored = worker_pb2.CommandResult(replayed=True)
    assert mailbox.admit(call("a"), lambda: stored).result() == stored


def test_a_failed_request_may_be_tried_again() -> None:
    mailbox = Mailbox(2)
    first = mailbox.admit(call("a"), no_reply)
    mailbox.take(0.0)
    first.fail(InvalidArgument("no"))
    assert mailbox.admit(call("a"), no_reply) is not first


def test_taking_from_an_empty_mailbox_gives_nothing_after_the_timeout() -> None:
    assert Mailbox(1).take(0.0) is None


def test_taking_waits_for_a_call() -> None:
    mailbox = Mailbox(1)
    taken: list[Call | None] = []
    taker = threading.Thread(target=lambda: taken.append(mailbox.take(30.0)))
    taker.start()
    arrived = mailbox.admit(call("a"), no_reply)
    taker.join(30.0)
    assert taken == [arrived]


def test_draining_refuses_what_has_not_begun_and_lets_the_rest_finish() -> None:
    mailbox = Mailbox(3)
    running, queued = (mailbox.admit(call(name), no_reply) for name in "ab")
    mailbox.take(0.0)
    mailbox.close(draining())
    with pytest.raises(Unavailable, match="draining"):
        queued.result()
    with pytest.raises(Unavailable, match="draining"):
        mailbox.admit(call("c"), no_reply)
    assert not running.is_done
    assert mailbox.admit(call("a"), no_reply) is running
    with pytest.raises(MailboxClosed):
        mailbox.take(0.0)


def running(mailbox: Mailbox, command: Command) -> Call:
    mailbox.admit(call("running", command), no_reply)
    taken = mailbox.take(0.0)
    assert taken is not None
    return taken


def test_a_call_that_repairs_comes_next_even_into_a_full_mailbox() -> None:
    mailbox = Mailbox(1)
    generating = running(mailbox, GENERATE)
    queued = mailbox.admit(call("queued", UPDATE), no_reply)
    load = mailbox.admit(call("load", LOAD), no_reply)
    assert generating.cancelled_because == "a checkpoint is being loaded"
    with pytest.raises(Unavailable, match="a checkpoint is being loaded"):
        queued.result()
    assert not load.is_done
    assert mailbox.take(0.0) is load


def test_repairs_do_not_refuse_each_other() -> None:
    mailbox = Mailbox(2)
    first, second = (mailbox.admit(call(name, LOAD), no_reply) for name in "ab")
    assert [mailbox.take(0.0), mailbox.take(0.0)] == [first, second]


def test_a_newer_controller_finds_an_empty_mailbox() -> None:
    mailbox = Mailbox(2)
    generating = running(mailbox, GENERATE)
    queued = mailbox.admit(call("queued"), no_reply)
    mailbox.supersede("a newer controller has taken over")
    assert generating.cancelled_because == "a newer controller has taken over"
    with pytest.raises(Unavailable, match="a newer controller"):
        queued.result()
    assert mailbox.num_queued == 0


def test_a_command_that_changes_weights_is_never_cancelled() -> None:
    mailbox = Mailbox(2)
    updating = running(mailbox, UPDATE)
    mailbox.supersede("a newer controller has taken over")
    mailbox.admit(call("load", LOAD), no_reply)
    assert updating.cancelled_because == ""


@pytest.mark.parametrize("is_early", [True, False])
def test_the_ranks_are_told_once_of_a_cancelled_call_whenever_it_happens(is_early: bool) -> None:
    one, told = call("a", GENERATE), []
    if is_early:
        one.cancel("first")
    one.on_cancel(lambda: told.append(one.cancelled_because))
    one.cancel("first")
    one.cancel("second")
    assert told == ["first"]


def test_a_call_that_is_answered_is_not_cancelled_any_more() -> None:
    one = call("a", GENERATE)
    one.resolve(worker_pb2.CommandResult())
    one.cancel("too late")
    assert one.cancelled_because == ""


def test_listeners_hear_of_every_part() -> None:
    one, news = call("a"), []
    one.listen(lambda: news.append([part.part for part in one.parts]))
    for part in (2, 1):
        one.part_ready(worker_pb2.PartReady(part=part, num_parts=2))
    assert news == [[2], [2, 1]]


def test_everything_open_hears_why_the_group_ends() -> None:
    mailbox = Mailbox(3)
    calls = [mailbox.admit(call(name), no_reply) for name in "ab"]
    mailbox.take(0.0)
    mailbox.fail_open(PeerDied("rank 1 died"))
    for one in calls:
        with pytest.raises(PeerDied, match="rank 1 died"):
            one.result()


def test_an_answer_that_was_given_stands() -> None:
    one = call("a")
    one.resolve(worker_pb2.CommandResult(committed_step=1))
    one.fail(PeerDied("too late"))
    assert one.result().committed_step == 1


def test_listeners_hear_of_new_phases_and_of_the_end_and_coalesce_the_rest() -> None:
    one, news = call("a"), []
    one.listen(lambda: news.append(one.progress.phase if one.progress else ""))
    for done in range(1000):
        one.report(done, 2000, "forward")
    one.report(0, 10, "backward")
    one.report(10, 10, "backward")
    one.resolve(worker_pb2.CommandResult())
    assert news[0] == "forward"
    assert news[-3:] == ["backward"] * 3
    assert len(news) < 100
    assert one.progress == worker_pb2.Progress(done=10, total=10, phase="backward")


def test_a_listener_that_left_hears_nothing() -> None:
    one, news = call("a"), []
    listener = lambda: news.append(1)  # noqa: E731
    one.listen(listener)
    one.unlisten(listener)
    one.resolve(worker_pb2.CommandResult())
    assert news == []
