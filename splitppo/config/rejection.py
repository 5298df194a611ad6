"""What `rollout_rs` and its thresholds in `algorithm.rollout_correction` say: which statistics reject, beyond what."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Statistics of the log-ratio, per token, or summed, averaged or maximised over a response. k1 is bounded on both sides.
REJECTION_OPTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)


@dataclass(frozen=True)
class Rejection:
    """One criterion: what lies outside [lower, upper] is rejected.

    Attributes:
        option: one of REJECTION_OPTIONS.
        lower: nats; None: no lower bound (k2 and k3 are never negative).
        upper: nats.
    """

    option: str
    lower: float | None
    upper: float

    @property
    def over(self) -> str:
        """What it looks at: token, seq_sum, seq_mean or seq_max."""
        return self.option.rpartition("_")[0]

    @property
    def estimate(self) -> str:
        """Of the KL: k1, k2 or k3."""
        return self.option.rpartition("_")[2]


def parse_rejections(rollout_rs: str | None, thresholds: str | float | None) -> tuple[Rejection, ...]:
    """The criteria of a comma-separated list; a response or token must pass all of them.

    Args:
        rollout_rs: names out of REJECTION_OPTIONS; None: nothing is rejected.
        thresholds: one for all, or as many as names, separated by commas. For k1 "lower_upper", bounds of the
            probability by the rollout engine over that by the trainer (k1 is its logarithm), or just the upper one,
            whose reciprocal is the lower one; for k2 and k3 an upper bound in nats.

    Raises:
        ValueError: a name is unknown or given twice, or thresholds do not fit the names.
    """
    if rollout_rs is None:
        if thresholds is not None:
            raise ValueError("rollout_rs_threshold is set, but rollout_rs is not")
        return ()
    options = [option.strip() for option in rollout_rs.split(",")]
    for option in options:
        if option not in REJECTION_OPTIONS:
            raise ValueError(f"rollout_rs: expected names out of {', '.join(REJECTION_OPTIONS)}, got {option!r}")
    if len(set(options)) < len(options):
        raise ValueError(f"rollout_rs: a name is given twice in {rollout_rs!r}")
    if thresholds is None:
        raise ValueError(f"rollout_rs {rollout_rs!r} needs rollout_rs_threshold")
    bounds = [bound.strip() for bound in str(thresholds).split(",")]
    if len(bounds) not in (1, len(options)):
        raise ValueError(
            f"rollout_rs_threshold: expected one threshold for all or {len(options)}, as many as rollout_rs names,"
            f" got {thresholds!r}"
        )
    if len(bounds) == 1:
        bounds *= len(options)
    return tuple(_rejection(option, bound) for option, bound in zip(options, bounds, strict=True))


def _rejection(option: str, bound: str) -> Rejection:
    try:
        numbers = [float(number) for number in bound.split("_")]
    except ValueError:
        numbers = []
    if option.endswith("k1"):
        if len(numbers) == 1 and numbers[0] > 0.0:
            numbers = [1.0 / numbers[0], numbers[0]]
        if len(numbers) != 2 or not 0.0 < numbers[0] <= numbers[1] < math.inf:
            raise ValueError(
                f"rollout_rs_threshold: {option} takes 'lower_upper' (in quotes) with 0 < lower <= upper, bounds of the"
                f" rollout engine's probability over the trainer's, or an upper bound of at least 1, got {bound!r}"
            )
        return Rejection(option, math.log(numbers[0]), math.log(numbers[1]))
    if len(numbers) != 1 or not 0.0 < numbers[0] < math.inf:
        raise ValueError(f"rollout_rs_threshold: {option} takes one positive upper bound in nats, got {bound!r}")
    return Rejection(option, None, numbers[0])
