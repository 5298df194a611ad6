"""Calls of commands, as their callers see them."""

from __future__ import annotations

from services.runtime.state.command_call import CommandCall
from splitppo.rpc.errors import WireError
from splitppo.v1 import worker_pb2


def result_of(call: CommandCall) -> worker_pb2.CommandResult:
    """Returns the reply to a call that was answered; raises its error."""
    events, _ = call.read(0)
    last = events[-1]
    if isinstance(last, WireError):
        raise last
    return last.result
