"""Back to a checkpoint, or past a damaged one: the pair is one thing, so both roles always go to the same step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controller.connection import ServiceGroups
from controller.run_folder import RunFolder
from controller.trace import Span
from splitppo.manifest import DamagedCheckpoint


@dataclass(frozen=True)
class Restored:
    """Where a restore has ended.

    Attributes:
        step: where all roles are; 0: at their initial models.
        spans: of what had to be loaded for it.
    """

    step: int
    spans: Sequence[Span]


class RestorePoint:
    """The checkpoint that the run goes back to next.

    That is the one that the run starts from (`run.resume`), until every role has been there; from then on it is the
    newest whole one. In between, later checkpoints of an earlier start still lie in the folder: they are not the
    run's, and a group that is lost meanwhile does not make them so.

    Args:
        step: that the run starts from; 0 is the initial model.
    """

    def __init__(self, folder: RunFolder, step: int) -> None:
        self._folder = folder
        self._step = step
        self._was_reached = False

    async def restore(self, groups: ServiceGroups) -> Restored:
        """Brings every role to the checkpoint, or to the newest one before it that is whole; removes later ones.

        A damaged checkpoint is set aside with a warning; where none is left, the roles reload their initial models.

        Raises:
            ConfigError: the checkpoint is of another model, or damaged and the one that `run.resume` names.
            WireError: a worker is lost.
        """
        folder, store = self._folder, self._folder.checkpoints
        if self._was_reached:
            self._step = folder.newest_whole_step()
        while True:
            try:
                manifests = store.check(self._step) if self._step else {}
                spans = await groups.restore(self._step, manifests)
            except DamagedCheckpoint as error:
                folder.refuse_if_named(self._step, error)
                store.set_aside(self._step, error)
                self._step = folder.newest_whole_step()
            else:
                break
        store.forget_after(self._step)
        self._was_reached = True
        return Restored(self._step, spans)
