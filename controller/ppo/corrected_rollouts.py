"""Rollout correction of a step, ragged as its columns are: `correct_rollout` where it is on, else only its metrics.

N tokens of responses, one row after the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from controller.ppo.blocks import blocks
from controller.ppo.rollout_correction import correct_rollout
from controller.ppo.rollout_mismatch import Mismatch
from splitppo.batch import Batch, Column
from splitppo.config import RolloutCorrectionConfig

# Padded tokens that are measured at a time.
_TOKENS = 1 << 17


@dataclass(frozen=True, eq=False)
class CorrectedRollouts:
    """As `Correction`, of ragged rows."""

    kept: Column
    weights: Column | None
    metrics: Mapping[str, float]


def correct_rollouts(config: RolloutCorrectionConfig, rollouts: Batch, mask: Column) -> CorrectedRollouts:
    """Weights, rejection and metrics, where both log-probs are known; else every token is kept as it is.

    ValueError where the correction needs log-probs that are not there.
    """
    if not ("old_log_probs" in rollouts and "rollout_log_probs" in rollouts):
        if config.is_active:
            raise ValueError("rollout correction needs old_log_probs and rollout_log_probs")
        return CorrectedRollouts(mask, None, {})
    old, sampled = rollouts["old_log_probs"], rollouts["rollout_log_probs"]
    if not config.is_active:
        return CorrectedRollouts(mask, None, _mismatch_metrics(old, sampled, mask))
    correction = correct_rollout(config, old.pad(), sampled.pad(), mask.pad())
    weights = None if correction.weights is None else mask.unpad(correction.weights)
    return CorrectedRollouts(mask.unpad(correction.kept), weights, correction.metrics)


def _mismatch_metrics(old: Column, sampled: Column, mask: Column) -> dict[str, float]:
    mismatch = Mismatch()
    for start, stop in blocks(mask.lengths, _TOKENS):
        mismatch.add(*(column.between(start, stop).pad() for column in (old, sampled, mask)))
    return mismatch.metrics()
