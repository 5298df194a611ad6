"""The work of a following rank on the orders of rank 0."""

from __future__ import annotations

from typing import Any, cast

import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from services.runtime.command import Command, Effect, Outcome
from services.runtime.failures.heartbeat import Activity
from services.runtime.failures.peer_watch import PeerWatch
from services.runtime.ranks.control_channel import LEAVE, ControlChannel, Order
from services.runtime.ranks.follower import Follower
from services.runtime.state.command_call import CommandCall
from splitppo.rpc.errors import Place
from splitppo.v1 import actor_pb2, batch_pb2, critic_pb2, reference_pb2, reward_model_pb2, rollout_pb2, worker_pb2

COMMITTED, NEXT, LOADED, SYNCED = 4, 5, 3, 2


class OneOrder:
    """A channel on which rank 0 gives one order, and then leaves."""

    num_orders = 1

    def __init__(self, order: Order) -> None:
        self._orders = [order, Order(LEAVE)]

    def next_order(self) -> Order:
        return self._orders.pop(0)

    def receive(self, rank: int) -> None:
        return None

    def send(self, *_: object) -> None:
        pass


class NoFailure:
    """A failure watch of a group in which nothing fails."""

    def is_cancelled(self, order: int) -> bool:
        return False

    def end_group(self, error: BaseException, place: Place) -> None:
        raise error

    def stop(self) -> None:
        pass


def requests() -> list[tuple[str, Message]]:
    """A request of every command of every service, with a step of its own in each place where there can be one."""
    services = [
        file.DESCRIPTOR.services_by_name.values()
        for file in (worker_pb2, actor_pb2, critic_pb2, reference_pb2, reward_model_pb2, rollout_pb2)
    ]
    found: list[tuple[str, Message]] = []
    for method in (method for several in services for service in several for method in service.methods):
        fields = method.input_type.fields_by_name
        if "header" not in fields or fields["header"].message_type != worker_pb2.CommandHeader.DESCRIPTOR:
            continue
        request: Any = GetMessageClass(method.input_type)(header=worker_pb2.CommandHeader(base_step=COMMITTED))
        if "slot" in fields:
            request.slot.CopyFrom(batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=NEXT))
        if "step" in fields:
            request.step = LOADED
        if "version" in fields:
            request.version = SYNCED
        found.append((method.name, request))
    return found


@pytest.mark.parametrize(("method", "request_"), requests(), ids=[type(request).__name__ for _, request in requests()])
def test_all_ranks_say_of_every_command_that_they_work_on_the_same_step(method: str, request_: Message) -> None:
    activity, places = Activity(), list[Place]()

    def run(*_: object) -> Outcome:
        places.append(activity.now().place)
        return Outcome()

    effect = Effect.WRITES_SLOT if "slot" in request_.DESCRIPTOR.fields_by_name else Effect.READS
    command = Command(method, type(request_), effect, run)
    channel = cast(ControlChannel, OneOrder(Order(0, request=request_.SerializeToString())))
    failure = cast(PeerWatch, NoFailure())

    Follower([command], channel, side_channel=channel, failure=failure, activity=activity).serve()

    assert places == [CommandCall(command, request_).place]
    of_committed = dict.fromkeys(("SaveCheckpoint", "ComputeWeightsDigest", "PublishWeights"), COMMITTED)
    expected = {"LoadCheckpoint": LOADED, "SyncWeights": SYNCED, **of_committed}
    assert places[0].step == expected.get(method, NEXT)
