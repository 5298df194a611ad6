"""Checks a command on rank 0 before it is sent to all ranks: the caller, the training step, the rows."""

from services.runtime.command import Effect
from services.runtime.state.batch_store import describe, may_have_parts
from services.runtime.state.command_call import CommandCall
from services.runtime.state.worker import Worker
from splitppo.batch import Batch
from splitppo.rpc.errors import InvalidArgument, WrongState, WrongStep


def check_identity(worker: Worker, call: CommandCall) -> None:
    """Checks that a call comes from the newest controller and names this service's committed training step.

    A role without a training step has the committed step None; -1 means that it waits for its first weights. Only a
    load may come to a group whose weights are in an unknown state.

    Raises:
        WireError: a newer controller has taken over, the weights are unknown, or the step is another one.
    """
    header = call.request.header
    effect = call.command.effect
    committed = worker.committed_step
    worker.fencing.check(header.run_id, header.epoch)
    if effect is not Effect.LOADS:
        worker.check_clean()
    if committed is None:
        return
    if header.base_step != committed:
        raise WrongStep(f"the caller expects committed step {header.base_step}, it is {committed}")
    if committed < 0 and effect is not Effect.LOADS:
        raise WrongState(f"the group has no weights yet: {worker.loading_method} comes first")
    if effect is Effect.TRAINS and call.request.slot.step != committed + 1:
        raise WrongStep(f"step {call.request.slot.step} cannot be committed, step {committed + 1} comes next")


def prepared_rows(worker: Worker, call: CommandCall) -> Batch | None:
    """Returns a command's rows from its slot, checked and completed by the role; None if it works on no slot."""
    command = call.command
    request = call.request
    wanted = command.rows
    command.check(request)
    if not command.effect.has_rows:
        return None
    stored = worker.slots.get(request.slot)
    if missing := [name for name in wanted.columns if name not in stored]:
        raise WrongState(f"the slot lacks {', '.join(missing)}; it has {', '.join(stored.columns)}")
    if stored.num_rows == 0:
        raise InvalidArgument("the slot has no rows")
    optional = [name for name in wanted.optional_columns if name in stored and name not in wanted.columns]
    rows = wanted.prepare(request, stored.select([*wanted.columns, *optional]))
    if command.num_parts_of(request, rows) and not may_have_parts(request.slot):
        raise InvalidArgument(
            f"only a whole slot of experience or a share can be worked on in parts, not the {describe(request.slot)}"
        )
    return rows
