"""Back to a checkpoint, or past a damaged one: the pair is one thing, so both roles always go to the same step."""

from __future__ import annotations

from controller.connection import ServiceGroups
from controller.run_folder import RunFolder
from splitppo.manifest import DamagedCheckpoint


async def restore_whole(groups: ServiceGroups, folder: RunFolder, step: int) -> int:
    """Brings every role to the checkpoint of `step`, or of the newest step before it whose checkpoint is whole.

    A damaged checkpoint is set aside with a warning; where none is left, the roles reload their initial models.

    Returns:
        the step that was restored; 0 for the initial models.

    Raises:
        ConfigError: the checkpoint is of another model, or damaged and the one that `run.resume` names.
        WireError: a worker is lost.
    """
    store = folder.checkpoints
    while True:
        try:
            manifests = store.check(step) if step else {}
            await groups.restore(step, manifests)
        except DamagedCheckpoint as error:
            folder.refuse_if_named(step, error)
            store.set_aside(step, error)
            step = store.newest_whole_step()
        else:
            return step
