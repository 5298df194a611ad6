"""Numbers per token that follow from the recorded ones: temporal difference, KL, ratio, mismatch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from splitppo.run_folder.rollouts import Float64s

COUNTS = 1  # the bit of a flag that is set for tokens of the model, not of an environment
_MAX_LOG_RATIO = 80.0  # keeps exp() finite


def derived(row: Mapping[str, Any], gamma: float) -> dict[str, list[float | None] | None]:
    """Computes the lists that are not stored; a list is None if one that it needs was not recorded.

        delta_t    = r_t + gamma * V_{t+1} - V_t, from one token that counts to the next one; V is 0 after the last
        kl_t       = log p_old - log p_ref        (k1 estimate)
        ratio_t    = p_new / p_old
        mismatch_t = |log p_old - log p_rollout|

    Tokens of an environment, which do not count, have none of them.
    """
    flags = row["flags"]
    found: dict[str, list[float | None] | None] = dict.fromkeys(("delta", "kl", "ratio", "mismatch"))
    if flags is None:
        return found
    counts = (np.array(flags, np.int64) & COUNTS) > 0
    old = _array(row["old"])
    ref = _array(row["ref"])
    rollout = _array(row["rollout"])
    new = _array(row["new"])
    value = _array(row["value"])
    reward = _array(row["rewards"])
    if value is not None and reward is not None:
        found["delta"] = _masked(deltas(reward, value, counts, gamma), counts)
    if old is not None and ref is not None:
        found["kl"] = _masked(old - ref, counts)
    if old is not None and new is not None:
        found["ratio"] = _masked(np.exp(np.minimum(new - old, _MAX_LOG_RATIO)), counts)
    if old is not None and rollout is not None:
        found["mismatch"] = _masked(np.abs(old - rollout), counts)
    return found


def deltas(reward: Float64s, value: Float64s, counts: npt.NDArray[np.bool_], gamma: float) -> Float64s:
    """Computes the temporal differences of one response; zero where a token does not count."""
    found = np.zeros_like(value)
    following = np.append(value[counts][1:], 0.0)
    found[counts] = reward[counts] + gamma * following[: counts.sum()] - value[counts]
    return found


def _array(values: Sequence[float | None] | None) -> Float64s | None:
    return None if values is None else np.array(values, np.float64)


def _masked(values: Float64s, counts: npt.NDArray[np.bool_]) -> list[float | None]:
    return [value if is_counted else None for value, is_counted in zip(values.tolist(), counts, strict=True)]
