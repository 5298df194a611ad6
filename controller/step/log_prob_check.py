"""The check that the rollout backend computes the same log-probs of sampled tokens as the trainer."""

import logging
from collections.abc import Mapping

from splitppo.config.sections.rollout import RolloutConfig
from splitppo.logs import FILE_ONLY

log = logging.getLogger(__name__)


class RolloutMismatch(Exception):
    """The rollout backend's log-probs are further from the trainer's than allowed; the message is one sentence."""


class LogProbCheck:
    """Compares log-probs in every n-th step, and in the first step of a trainer: after a start, resume or recovery."""

    def __init__(self, config: RolloutConfig, *, first_step: int) -> None:
        self._check_freq = config.check_freq or 0
        self._max_diff = config.max_log_prob_diff
        self._first_step = first_step

    def is_due(self, step: int) -> bool:
        """Returns True if the log-probs of this step are compared, for which the trainer's must be computed."""
        return self._check_freq > 0 and (step == self._first_step or step % self._check_freq == 0)

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Checks the difference in a step's metrics, if it is due; a step without tokens has nothing to compare.

        Raises:
            RolloutMismatch: the largest difference is over `rollout.max_log_prob_diff`, or not a number.
        """
        largest = metrics.get("training/rollout_log_probs_diff_max")
        if largest is None or self._max_diff is None or not self.is_due(step):
            return
        mean = metrics["training/rollout_log_probs_diff_mean"]
        diff = f"log-probs of the rollout backend and the trainer differ by up to {largest:.3g} nats (mean {mean:.3g})"
        if not largest <= self._max_diff:
            raise RolloutMismatch(
                f"step {step}: {diff} on the same tokens, allowed are {self._max_diff:g}"
                " (rollout.max_log_prob_diff): the rollout backend does not hold the trainer's weights, or computes"
                " them differently"
            )
        log.info("step %d: %s, allowed are %g", step, diff, self._max_diff, extra=FILE_ONLY)
