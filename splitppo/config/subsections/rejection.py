"""Parses the thresholds of `algorithm.rollout_correction`: bounds of importance weights, criteria of rejection."""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

# Statistics of the log-ratio, per token, or summed, averaged or maximised over a response. k1 is bounded on both sides,
# but its maximum, which looks for one token that the trainer finds improbable, only from above.
REJECTION_OPTIONS = (
    *(f"{over}_{estimate}" for over in ("token", "seq_sum", "seq_mean") for estimate in ("k1", "k2", "k3")),
    *("seq_max_k1", "seq_max_k2", "seq_max_k3"),
)


@dataclass(frozen=True)
class Rejection:
    """One criterion of rollout correction: a statistic of log-ratios, and its accepted range in nats.

    `option` is one of REJECTION_OPTIONS: outside of its range it rejects tokens, or whole responses. Only statistics of
    k1 have a lower bound, and not their maximum.
    """

    option: str
    lower: float | None
    upper: float

    @property
    def over(self) -> str:
        return self.option.rpartition("_")[0]

    @property
    def estimate(self) -> str:
        return self.option.rpartition("_")[2]


def parse_rejections(rollout_rs: str | None, thresholds: str | float | None) -> tuple[Rejection, ...]:
    """Parses a comma-separated list of REJECTION_OPTIONS and its thresholds into criteria, all of which must be passed.

    `thresholds` is one threshold for all criteria, or one for each, with commas between them. For k1, whose statistic
    is the log of a probability ratio, the threshold bounds the ratio itself.

    Raises:
        ValueError: a name is unknown or given twice, or the thresholds do not fit the names.
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
    if len(bounds) == 1:
        bounds *= len(options)
    if len(bounds) != len(options):
        raise ValueError(
            f"rollout_rs_threshold: expected one threshold for all or {len(options)}, as many as rollout_rs names,"
            f" got {thresholds!r}"
        )
    return tuple(map(_rejection, options, bounds))


def parse_weight_bounds(threshold: str | float) -> tuple[float | None, float]:
    """Parses the threshold of importance weights, "upper" or "lower_upper", and returns (lower or None, upper).

    If lower is None, larger weights are truncated to upper; else weights outside of the bounds become 0.

    Raises:
        ValueError: `threshold` is neither one number nor two.
    """
    numbers = _numbers(str(threshold))
    if len(numbers) == 1 and 1.0 <= numbers[0] < math.inf:
        return None, numbers[0]
    if len(numbers) == 2 and 0.0 < numbers[0] <= numbers[1] < math.inf:
        return numbers[0], numbers[1]
    raise ValueError("expected a number of at least 1, or 'lower_upper' (in quotes) with 0 < lower <= upper")


def _checked_weight_bounds(threshold: str | float) -> str | float:
    parse_weight_bounds(threshold)
    return threshold


WeightBounds = Annotated[str | float, AfterValidator(_checked_weight_bounds)]


def _numbers(bounds: str) -> list[float]:
    """Parses the numbers between underscores in a text such as "0.5_2.0"; returns [] if one of them is not a number."""
    try:
        return [float(number) for number in bounds.split("_")]
    except ValueError:
        return []


def _rejection(option: str, bound: str) -> Rejection:
    """Parses the threshold of one criterion of rejection into bounds of its statistic, in nats.

    The thresholds of k1 are ratios p_rollout / p_trainer, so their logarithms are the bounds; one number u stands for
    1/u and u, but for seq_max_k1 it is the upper bound alone. Those of k2 and k3 are upper bounds in nats already.

    Raises:
        ValueError: the threshold has another form.
    """
    numbers = _numbers(bound)
    if option == "seq_max_k1":
        if len(numbers) != 1 or not 1.0 < numbers[0] < math.inf:
            raise ValueError(
                f"rollout_rs_threshold: {option} takes one upper bound above 1 of the rollout backend's probability"
                f" over the trainer's, got {bound!r}"
            )
        return Rejection(option, None, math.log(numbers[0]))
    if option.endswith("k1"):
        if len(numbers) == 1 and numbers[0] > 0.0:
            numbers = [1.0 / numbers[0], numbers[0]]
        if len(numbers) != 2 or not 0.0 < numbers[0] <= numbers[1] < math.inf:
            raise ValueError(
                f"rollout_rs_threshold: {option} takes 'lower_upper' (in quotes) with 0 < lower <= upper, bounds of the"
                f" rollout backend's probability over the trainer's, or an upper bound of at least 1, got {bound!r}"
            )
        return Rejection(option, math.log(numbers[0]), math.log(numbers[1]))
    if len(numbers) != 1 or not 0.0 < numbers[0] < math.inf:
        raise ValueError(f"rollout_rs_threshold: {option} takes one positive upper bound in nats, got {bound!r}")
    return Rejection(option, None, numbers[0])
