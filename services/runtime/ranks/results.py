"""Keeps the results of commands on rank 0: the columns in the slot, the step in the ledger."""

from services.runtime.role import Outcome
from services.runtime.state.command_call import CommandCall
from services.runtime.state.worker import Worker
from splitppo import failpoints
from splitppo.rpc.errors import Internal
from splitppo.user_file import describe
from splitppo.v1 import worker_pb2


def keep_result(
    worker: Worker, call: CommandCall, outcome: Outcome, engine_time: worker_pb2.EngineTime
) -> worker_pb2.CommandResult:
    """Stores a command's result: columns in the slot, a new step in the ledger so that nothing is done twice.

    A command that commits frees its slot; the columns of its result take the place of the rows until the next commit.

    Returns the reply to the call.

    Raises:
        Internal: a step was made that the ledger does not have; the worker is dirty then.
    """
    command = call.command
    before = worker.committed_step or 0
    step = call.request.version if command.syncs else before + (1 if command.commits else 0)
    try:
        reply = worker_pb2.CommandResult(
            engine_time=engine_time,
            metrics=outcome.metrics,
            committed_step=step,
            weights_sha256=outcome.weights_sha256,
            policy_version=outcome.policy_version,
        )
        if command.sets_step:
            assert worker.ledger is not None, "who has a step has a ledger"
            worker.ledger.commit(step, call.request_id, call.stored(reply))
            if step > before:
                worker.slots.commit(step, outcome.columns)
            else:
                worker.slots.clear()
        elif outcome.columns is not None:
            worker.slots.absorb(call.request.slot, outcome.columns, call.reply_key, call.stored(reply))
    except Exception as error:
        if not command.sets_step:
            raise
        because = f"{command.method} is in no ledger ({describe(error)})"
        worker.mark_dirty(because)
        raise Internal(because) from error
    if command.repairs:
        worker.mark_clean()
    if command.commits:
        failpoints.hit(f"{command.point}.committed")
    return reply
