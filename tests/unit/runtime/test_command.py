"""What a command declares: its effect, and whether it works on the rows of a slot."""

from __future__ import annotations

import pytest

from services.runtime.command import Command, Effect, Outcome, refused_command, step_of
from splitppo.rpc.errors import InvalidArgument
from splitppo.v1 import actor_pb2, rollout_pb2, worker_pb2


@pytest.mark.parametrize("effect", Effect, ids=lambda effect: effect.name)
def test_a_command_has_rows_exactly_if_its_request_names_a_slot(effect: Effect) -> None:
    with_slot = actor_pb2.GenerateRequest
    without = worker_pb2.SaveCheckpointRequest
    right, wrong = (with_slot, without) if effect.has_rows else (without, with_slot)
    assert Command("Any", right, effect, lambda *_: Outcome()).effect is effect
    with pytest.raises(ValueError, match=f"Any {effect.name}, and its request says otherwise"):
        Command("Any", wrong, effect, lambda *_: Outcome())


@pytest.mark.parametrize("request_type", [actor_pb2.GenerateRequest, actor_pb2.PublishWeightsRequest])
def test_a_refused_command_says_why_whatever_its_request_is(request_type: type) -> None:
    command = refused_command("Any", request_type, "call another group")
    with pytest.raises(InvalidArgument, match="call another group"):
        command.check(request_type())


def test_the_step_of_a_request_is_that_of_its_slot_else_its_own_else_the_committed_one() -> None:
    header = worker_pb2.CommandHeader(base_step=4)
    assert step_of(rollout_pb2.SyncWeightsRequest(header=header, version=7)) == 7
    assert step_of(worker_pb2.LoadCheckpointRequest(header=header, step=2)) == 2
    assert step_of(worker_pb2.SaveCheckpointRequest(header=header)) == 4
