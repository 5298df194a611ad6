"""Computes what a teacher says of the sampled tokens: the signal per token, and how far the policy is from the teacher.

N tokens of responses, one row after the other; B responses. float64 inside.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from controller.ppo.masked_stats import Float64s
from splitppo.batch import Batch, Column
from splitppo.config import ConfigError
from splitppo.config.sections.teacher import TeacherConfig


def teacher_signal(teacher: TeacherConfig, rollouts: Batch, response_mask: Column) -> Float64s:
    """Computes coef * d of each token, [N] in nats, 0 outside the mask.

        d = log q - log p, each at least `log_prob_min`; cut off at +-`max_abs`

    q is the probability by the teacher and p that by the policy that sampled: -d is the k1 estimate of the policy's KL
    from the teacher (Thinking Machines, 2025, "On-Policy Distillation").
    """
    of_teacher_N, of_policy_N = _log_probs(teacher, rollouts)
    if teacher.log_prob_min is not None:
        of_teacher_N, of_policy_N = (np.maximum(each, teacher.log_prob_min) for each in (of_teacher_N, of_policy_N))
    d_N = of_teacher_N - of_policy_N
    if teacher.max_abs is not None:
        d_N = np.clip(d_N, -teacher.max_abs, teacher.max_abs)
    return np.where(response_mask.values, teacher.coef * d_N, 0.0)


def add_signal(values: Column, signal_N: Float64s, where: Column) -> Column:
    """Adds the signal to rewards or advantages, on the tokens that are marked in `where`; float32."""
    total_N = np.where(where.values, values.values + signal_N, values.values)
    return Column(total_N.astype(np.float32), values.lengths)


def distillation_metrics(
    teacher: TeacherConfig, rollouts: Batch, response_mask: Column, data_sources_B: NDArray[np.object_]
) -> dict[str, float]:
    """Computes distillation/... of all rows and of each data source; nothing where no token counts.

    kl          mean of log p - log q, the k1 estimate of the policy's KL from the teacher
    agreement   mean of min(1, q / p): 1 - the total variation between both, which is the share of sampled tokens
                that speculative sampling would accept (Leviathan et al., 2023)
    """
    of_teacher_N, of_policy_N = _log_probs(teacher, rollouts)
    d_N = of_teacher_N - of_policy_N
    mask_N = response_mask.values
    source_N = np.repeat(data_sources_B, response_mask.lengths)
    metrics = {"distillation/coef": teacher.coef, **_means("distillation", d_N[mask_N])}
    for source in sorted(set(data_sources_B)):
        metrics |= _means(f"distillation/{source}", d_N[mask_N & (source_N == source)])
    return metrics


def _means(name: str, d_N: Float64s) -> Mapping[str, float]:
    if not len(d_N):
        return {}
    return {f"{name}/kl": 0.0 - float(d_N.mean()), f"{name}/agreement": float(np.exp(np.minimum(d_N, 0.0)).mean())}


def _log_probs(teacher: TeacherConfig, rollouts: Batch) -> tuple[Float64s, Float64s]:
    """Returns the log-probs of all tokens, by their teacher and by the policy that sampled, [N] each.

    Not every step of a run whose loss has the signal has old log-probs: it takes those of the rollout backend.

    Raises:
        ConfigError: a log-prob of the teacher is not finite.
    """
    of_policy = rollouts["rollout_log_probs" if teacher.is_in_loss else "old_log_probs"]
    of_teacher_N = rollouts["teacher_log_probs"].values.astype(np.float64)
    if not np.isfinite(of_teacher_N).all():
        wrong = of_teacher_N[~np.isfinite(of_teacher_N)][0]
        raise ConfigError(f"teacher.model: expected finite log-probs from {', '.join(teacher.folders)}, got {wrong}")
    return of_teacher_N, of_policy.values.astype(np.float64)
