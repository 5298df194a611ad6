"""What the rollout engine tells of its groups, as parts of the command that it works on."""

from __future__ import annotations

import numpy as np

from services.actor.rollout.protocol import PromptRows, Rollout
from services.shell.commands import Report
from splitppo.batch import Batch


class ReportingListener:
    """The engine's `Listener` of one Generate on one rank.

    Args:
        batch: this rank's rows: prompts, seeds and, where the command is streamed, groups.
        report: of the command.
        policy_version: of the weights that sample.
    """

    def __init__(self, batch: Batch, report: Report, policy_version: int) -> None:
        self._batch = batch
        self._report = report
        self._policy_version = policy_version
        self._is_streamed = "groups" in batch

    @property
    def rows(self) -> PromptRows:
        """What the engine is asked for."""
        batch = self._batch
        groups = batch["groups"].values.astype(np.int64) if self._is_streamed else np.zeros(batch.num_rows, np.int64)
        return PromptRows(batch["prompts"].rows(), batch["seeds"].rows(), groups)

    def columns(self, rollout: Rollout, group: int | None = None) -> Batch:
        """The new rows of a group, or all of them: prompts, responses, rollout_log_probs."""
        asked = self._batch
        if group is not None:
            asked = asked.take(np.flatnonzero(asked["groups"].values == group))
        prompts = asked["prompts"].take(np.repeat(np.arange(asked.num_rows), asked["seeds"].lengths))
        columns = {"prompts": prompts, "responses": rollout.responses, "rollout_log_probs": rollout.log_probs}
        return Batch(prompts.num_rows, columns)

    def progress(self, done: int, total: int) -> None:
        """See `Listener`."""
        self._report(done, total, "generate")

    def group_ended(self, group: int, rollout: Rollout) -> None:
        """See `Listener`; what is not streamed has one group, of which nobody is told."""
        if self._is_streamed:
            self._report.part_ready(group + 1, self.columns(rollout, group), policy_version=self._policy_version)

    @property
    def is_cancelled(self) -> bool:
        """See `Listener`."""
        return self._report.is_cancelled
