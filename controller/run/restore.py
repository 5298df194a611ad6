"""Restores all roles to one undamaged checkpoint, after a group was lost or at the start of a run."""

import logging
from collections.abc import Sequence
from pathlib import Path

from controller.run.checkpoint_store import CheckpointStore
from controller.run.state import RunState
from controller.workers.worker_groups import WorkerGroups
from splitppo.config import Config, ConfigError
from splitppo.manifest import DamagedCheckpoint
from splitppo.run_folder.spans import Span

log = logging.getLogger(__name__)


class RestorePoint:
    """The checkpoint from which the run starts, or to which it goes back after the loss of a group.

    Until every role has been restored once, this is the checkpoint that `run.resume` chooses, also if a group is lost
    meanwhile: later checkpoints of an earlier start, which may still lie in the folder, are not used. After the first
    restore, it is the newest undamaged checkpoint.

    Attributes:
        step: the step of the checkpoint; 0 stands for the initial models.
        state: the controller's state after that step.
        metrics: the metrics of that step; None for step 0.
        rollouts: the file with finished rollouts of the step after it; None if the checkpoint has none.

    Raises:
        ConfigError: `run.resume` names a folder that is no complete checkpoint or a damaged one, or the controller's
            part of the checkpoint cannot be used.
    """

    def __init__(self, config: Config, store: CheckpointStore) -> None:
        """Removes incomplete checkpoints, and loads the one that `run.resume` chooses: none, the newest, a folder."""
        self._config = config
        self._store = store
        self._was_reached = False
        for step in store.remove_leftovers():
            log.warning("removed the checkpoint of step %d: COMMITTED is missing, it was never completed", step)
        match config.run.resume:
            case "disable":
                self.step = 0
            case "auto":
                self.step = store.newest_whole_step()
            case folder:
                self.step = store.adopt(Path(folder))
        if config.evaluation.val_only and store.latest_step() > self.step:
            raise ConfigError(
                f"evaluation.val_only: the run would go back to step {self.step}, and lose its later checkpoints;"
                " give another run.dir"
            )
        self._load()

    def _load(self) -> None:
        """Loads the controller's part of the chosen checkpoint; at step 0 its state is that of a run that begins."""
        part = self._store.load(self.step) if self.step else None
        self.state = part.state if part else RunState.initial(self._config)
        if self.state.best_step not in self._store.steps():  # it is the best of another run
            self.state = self.state.model_copy(update={"best": None})
        self.metrics = part.metrics if part else None
        self.rollouts = self._store.rollouts(self.step) if self.step else None

    async def restore(self, groups: WorkerGroups) -> Sequence[Span]:
        """Makes every role load this checkpoint, or if damaged the newest whole one before it; removes later ones.

        A damaged checkpoint is renamed with a warning. If no checkpoint is left, the roles load their initial models.

        Returns:
            The spans of the loads, for the timeline.

        Raises:
            ConfigError: the checkpoint is of another model, or its controller's part cannot be used, or `run.resume`
                names it and it is damaged.
            WireError: a worker is lost.
        """
        if self._was_reached:
            self.step = self._store.newest_whole_step()
        while True:
            try:
                manifests = self._store.check(self.step) if self.step else {}
                self._load()
                spans = await groups.restore(self.step, manifests)
                break
            except DamagedCheckpoint as error:
                self._store.set_aside(self.step, error)
                self.step = self._store.newest_whole_step()
        self._store.forget_after(self.step)
        self._was_reached = True
        return spans
