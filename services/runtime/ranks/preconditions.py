"""Checks a command on rank 0 before it is sent to all ranks: the caller, the training step, the rows."""

from services.runtime.ranks.parts import num_parts_of
from services.runtime.state.batch_store import KINDS_WITH_PARTS, describe
from services.runtime.state.command_call import CommandCall
from services.runtime.state.worker import Worker
from splitppo.batch import Batch
from splitppo.rpc.errors import InvalidArgument, WrongState, WrongStep


def check_identity(worker: Worker, call: CommandCall) -> None:
    """Checks that a call comes from the newest controller and names this service's committed training step."""
    header = call.request.header
    command = call.command
    committed = worker.committed_step
    worker.fencing.check(header.run_id, header.epoch)
    if not command.repairs:
        worker.check_clean()
    if committed is None:
        return
    if header.base_step != committed:
        raise WrongStep(f"the caller expects committed step {header.base_step}, it is {committed}")
    if committed < 0 and not command.repairs:
        raise WrongState("the group has no weights yet: SyncWeights comes first")
    if command.commits and call.request.slot.step != committed + 1:
        raise WrongStep(f"step {call.request.slot.step} cannot be committed, step {committed + 1} comes next")


def prepared_rows(worker: Worker, call: CommandCall) -> Batch | None:
    """Returns a command's rows from its slot, checked and completed by the role; None if it works on no slot."""
    command = call.command
    request = call.request
    command.check(request)
    if not command.works_on_slot:
        return None
    stored = worker.slots.get(request.slot)
    if missing := [name for name in command.columns if name not in stored]:
        raise WrongState(f"the slot lacks {', '.join(missing)}; it has {', '.join(stored.columns)}")
    if stored.num_rows == 0:
        raise InvalidArgument("the slot has no rows")
    optional = [name for name in command.optional_columns if name in stored and name not in command.columns]
    rows = command.prepare(request, stored.select([*command.columns, *optional]))
    if num_parts_of(command, request, rows) and (request.slot.kind not in KINDS_WITH_PARTS or request.slot.part):
        raise InvalidArgument(
            f"only a whole slot of experience or a share can be worked on in parts, not the {describe(request.slot)}"
        )
    return rows
