"""What is checked between the mailbox and the order to all ranks: who asks, for which step, with which rows."""

from __future__ import annotations

from services.shell.lifecycle import LifecycleCommand
from services.shell.mailbox import Call
from services.shell.slots import describe
from services.shell.worker import Worker
from splitppo.batch import Batch
from splitppo.rpc.errors import InvalidArgument, WrongState, WrongStep
from splitppo.v1 import batch_pb2


def check_identity(worker: Worker, call: Call) -> None:
    """The caller must be the newest controller, and mean the step that this service is at."""
    header, command, committed = call.request.header, call.command, worker.ledger.committed_step
    worker.claim.check(header.run_id, header.epoch)
    if not command.repairs:
        worker.check_clean()
    if header.base_step != committed:
        raise WrongStep(f"the caller expects committed step {header.base_step}, it is {committed}")
    if command.commits and call.request.slot.step != committed + 1:
        raise WrongStep(f"step {call.request.slot.step} cannot be committed, step {committed + 1} comes next")


def prepared_rows(worker: Worker, call: Call) -> Batch | None:
    """The columns of the slot that the command needs, checked and completed by the role."""
    command = call.command
    if isinstance(command, LifecycleCommand) and command.check is not None:
        command.check(call.request)
    if not call.works_on_slot:
        return None
    stored = worker.slots.get(call.request.slot)
    if missing := [name for name in command.columns if name not in stored]:
        raise WrongState(f"the slot lacks {', '.join(missing)}; it has {', '.join(stored.columns)}")
    if stored.num_rows == 0:
        raise InvalidArgument("the slot has no rows")
    optional = [name for name in command.optional_columns if name in stored and name not in command.columns]
    rows = stored.select([*command.columns, *optional])
    rows = command.prepare(call.request, rows) if command.prepare else rows
    slot = call.request.slot
    if "groups" in rows and (slot.kind != batch_pb2.SLOT_KIND_EXPERIENCE or slot.part):
        raise InvalidArgument(f"only a whole experience slot can be worked on in parts, not the {describe(slot)}")
    return rows
