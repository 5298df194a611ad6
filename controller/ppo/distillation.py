"""On-policy distillation: a frozen teacher says of each sampled token how likely it would have been.

From the configuration to the gradient, for the section `teacher`:

1. `signal`, `models` and `top_k` say which teachers there are and what each has to compute: `TeacherConfig`
   (splitppo/config/sections/teacher.py). `placement.teacher` names the group that holds them.
2. Each row goes to the teacher of its data source: the column `teachers`, by `teachers_of_rows`.
3. A teacher is a frozen model like the reference (services/roles/frozen_models.py), which adds `teacher_log_probs`
   to the rows, and with `top_k` the ids and log-probs of the tokens that it finds most likely.
4. With signal `advantage` or `reward`, the controller adds `coef` * d to advantages or rewards: `teacher_signal` and
   `add_signal`, at the places where controller/ppo/experience.py calls them.
5. With signal `loss` or `top_k`, these columns go to the actor's group, whose loss has a term of its own:
   services/actor/losses/distillation.py. `loss_coef` goes there with each update.
6. Every step measures the KL from the teachers (`distillation_metrics`); `next_coef` moves an adaptive `coef` by it.

What else names teachers only carries them: columns, slots, placement, memory, and checks of models and tokenizers.

Shapes: N tokens of responses, one row after the other; B responses. float64 inside.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from controller.ppo.kl import next_kl_coef
from controller.ppo.masked_stats import Float64s
from splitppo.batch import Batch, Column
from splitppo.config import ConfigError
from splitppo.config.sections.teacher import TeacherConfig

NO_TEACHER = TeacherConfig()


def teachers_of_rows(teacher: TeacherConfig, data_sources: Sequence[str]) -> Batch:
    """Returns the column `teachers` for rows of these data sources: the number of each row's teacher.

    There is no column unless there are several teachers.
    """
    if len(teacher.folders) < 2:
        return Batch(len(data_sources), {})
    return Batch.from_rows(teachers=[[teacher.number_of(source)] for source in data_sources])


def loss_coef(teacher: TeacherConfig) -> float | None:
    """Returns the weight of the teachers' term in the actor's loss; None if the loss has no such term."""
    return teacher.coef if teacher.is_in_loss else None


def with_coef(teacher: TeacherConfig, coef: float | None) -> TeacherConfig:
    """Returns the settings with the weight that adaptive control has come to; unchanged without one (None)."""
    return teacher if teacher.kl_ctrl == "fixed" or coef is None else teacher.changed("", {"coef": coef})


def next_coef(
    teacher: TeacherConfig, coef: float | None, metrics: Mapping[str, float], *, num_samples: int
) -> float | None:
    """Returns the weight after a step, moved by the step's KL from the teachers, see `next_kl_coef`.

    `coef` is the weight to which adaptive control has come so far; it is returned as it is where the weight is fixed.
    """
    if teacher.kl_ctrl == "fixed":
        return coef
    current = teacher.coef if coef is None else coef
    return next_kl_coef(teacher, current, metrics.get("distillation/kl"), num_samples=num_samples)


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
    """Returns the two metrics of tokens with these d = log q - log p, [N]; {} without tokens. The KL is never -0."""
    if not len(d_N):
        return {}
    return {f"{name}/kl": 0.0 - float(d_N.mean()), f"{name}/agreement": float(np.exp(np.minimum(d_N, 0.0)).mean())}


def _log_probs(teacher: TeacherConfig, rollouts: Batch) -> tuple[Float64s, Float64s]:
    """Returns the log-probs of all tokens, by their teacher and by the policy that sampled, [N] each.

    Raises:
        ConfigError: a log-prob of the teacher is not finite.
    """
    of_policy = rollouts[teacher.policy_column]
    of_teacher_N = rollouts["teacher_log_probs"].values.astype(np.float64)
    if not np.isfinite(of_teacher_N).all():
        wrong = of_teacher_N[~np.isfinite(of_teacher_N)][0]
        raise ConfigError(f"teacher.model: expected finite log-probs from {', '.join(teacher.folders)}, got {wrong}")
    return of_teacher_N, of_policy.values.astype(np.float64)
