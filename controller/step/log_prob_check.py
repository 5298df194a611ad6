"""Checks that the rollout backend and the trainer compute the same log-probs of the sampled tokens."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from splitppo.config.sections.rollout import RolloutConfig
from splitppo.logs import FILE_ONLY

log = logging.getLogger(__name__)


class RolloutMismatch(Exception):
    """The rollout backend's log-probs are further from the trainer's than allowed; the message is one sentence."""


@dataclass(frozen=True)
class LogProbCheck:
    """Compares the rollout backend's log-probs with the trainer's every `rollout.check_freq` steps.

    The first step after a start, resume or recovery is compared, too.
    """

    config: RolloutConfig
    first_step: int

    def is_due(self, step: int) -> bool:
        """Returns True if this step compares the log-probs, so that the trainer's log-probs must be computed."""
        check_freq = self.config.check_freq or 0
        return check_freq > 0 and (step == self.first_step or step % check_freq == 0)

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Checks that the step's metrics show no too large difference of log-probs, in steps that compare them.

        Raises:
            RolloutMismatch: see `compare`.
        """
        largest = metrics.get("training/rollout_log_probs_diff_max")
        if largest is None or not self.is_due(step):
            return
        self.compare(f"step {step}", largest, metrics["training/rollout_log_probs_diff_mean"])

    def compare(self, subject: str, largest: float, mean: float) -> None:
        """Logs the differences of log-probs of the same tokens, in nats; `subject` is the beginning of the sentence.

        Raises:
            RolloutMismatch: the largest difference is over `rollout.max_log_prob_diff`, the mean one over
                `rollout.max_mean_log_prob_diff`, or one of them is not a number.
        """
        bounds = {
            "max_log_prob_diff": (largest, self.config.max_log_prob_diff),
            "max_mean_log_prob_diff": (mean, self.config.max_mean_log_prob_diff),
        }
        diff = f"log-probs of the rollout backend and the trainer differ by up to {largest:.3g} nats (mean {mean:.3g})"
        for key, (found, allowed) in bounds.items():
            assert allowed is not None, "load resolves it"
            if not found <= allowed:
                raise RolloutMismatch(
                    f"{subject}: {diff} on the same tokens, allowed are {allowed:g} (rollout.{key}): the rollout"
                    " backend has other weights than the trainer, or computes log-probs differently"
                )
        log.info("%s: %s, which is allowed", subject, diff, extra=FILE_ONLY)
