"""Keeps the results of commands on rank 0, as their effect says: columns in a slot, the step in the ledger."""

from services.runtime.command import Effect, Outcome, step_of
from services.runtime.state.command_call import CommandCall
from services.runtime.state.worker import Worker
from splitppo import failpoints
from splitppo.rpc.errors import Internal, WireError
from splitppo.user_file import describe
from splitppo.v1 import worker_pb2


def keep_result(
    worker: Worker, call: CommandCall, outcome: Outcome, engine_time: worker_pb2.EngineTime
) -> worker_pb2.CommandResult:
    """Stores the result of a command by the rules of its `Effect`, so that nothing is done twice.

    Returns the reply to the call.

    Raises:
        Internal, DataLoss: weights were changed, and the ledger does not have their step; the worker is dirty then.
    """
    command = call.command
    try:
        reply = worker_pb2.CommandResult(
            engine_time=engine_time,
            metrics=outcome.metrics,
            committed_step=_step_after(worker, call),
            weights_sha256=outcome.weights_sha256,
            policy_version=outcome.policy_version,
        )
        if command.effect is Effect.WRITES_SLOT and outcome.columns is not None:
            worker.slots.absorb(call.request.slot, outcome.columns, call.reply_key, call.stored(reply))
        elif command.effect is Effect.TRAINS:
            _commit(worker, call, outcome, reply)
        elif command.effect is Effect.LOADS:
            _take_over(worker, call, outcome, reply)
    except Exception as error:
        if not command.effect.sets_step:
            raise
        because = f"{command.method} is in no ledger ({describe(error)})"
        worker.mark_dirty(because)
        raise error if isinstance(error, WireError) else Internal(because) from error
    if command.effect is Effect.TRAINS:
        failpoints.hit(f"{command.point}.committed")
    return reply


def _step_after(worker: Worker, call: CommandCall) -> int:
    """Returns the committed step after a command; 0 in a group without a step."""
    return step_of(call.request) if call.command.effect.sets_step else worker.committed_step or 0


def _commit(worker: Worker, call: CommandCall, outcome: Outcome, reply: worker_pb2.CommandResult) -> None:
    """Commits the step of a command that has trained, which drops its rows; the columns of its result replace them."""
    assert worker.ledger is not None, "who trains has a ledger"
    worker.ledger.commit(reply.committed_step, call.request_id, call.stored(reply))
    worker.slots.commit(reply.committed_step, outcome.columns)


def _take_over(worker: Worker, call: CommandCall, outcome: Outcome, reply: worker_pb2.CommandResult) -> None:
    """Makes the step of loaded weights the committed one; rows for later steps stay if that step is a later one.

    Of a checkpoint, whose ledger may repeat steps, no row stays.
    """
    assert worker.ledger is not None, "who loads weights has a ledger"
    step = reply.committed_step
    is_later = step > worker.ledger.committed_step
    if outcome.saved_ledger is not None:
        worker.ledger.restore(outcome.saved_ledger, step)
    else:
        worker.ledger.commit(step, call.request_id, call.stored(reply))
    if is_later and outcome.saved_ledger is None:
        worker.slots.commit(step)
    else:
        worker.slots.clear()
    worker.mark_clean()
