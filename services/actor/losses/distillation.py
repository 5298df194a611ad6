"""The term of the teachers in the actor's loss: the KL between policy and teacher at each response token.

Its gradient is that of `teacher.coef` times the sum of this term over the tokens of a mini-batch (actor_loss.py). It
exists with `teacher.signal` loss and top_k; with other signals the actor's group hears nothing of teachers.
controller/ppo/distillation.py explains distillation as a whole. In the worker groups, the teachers themselves are
frozen models (services/roles/frozen_models.py), and engine/model/forward.py looks up the policy's log-probs of their
most likely tokens. An update request may carry another `coef` (loss_terms.py).

Shapes: N response tokens of all rows of a micro-batch, packed; K tokens that the teacher finds most likely there.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.actor.losses.kl import kl_estimate
from services.engine.batching.row_checks import check_ids, refuse
from splitppo.batch import Batch
from splitppo.config.sections.teacher import TeacherConfig

# The log of the largest probability that K tokens have together, so that the log of the rest is finite.
_MAX_LOG_MASS = -1e-6
_MAX_LOG_PROB = 1e-3  # rounding of a probability of 1


def loss_columns(teacher: TeacherConfig) -> tuple[str, ...]:
    """Returns the columns of the teachers that an update needs; none if the loss has no term of them."""
    return teacher.columns if teacher.is_in_loss else ()


def check_columns(batch: Batch, teacher: TeacherConfig, model: Any) -> None:
    """Checks the columns of the teachers' most likely tokens, with signal top_k.

    Raises:
        ValueError: a token has another number of them than `top_k`, an id is outside the vocabulary, or a log-prob is
            over 0.
    """
    if teacher.signal != "top_k":
        return
    for name in ("teacher_top_ids", "teacher_top_log_probs"):
        if not np.array_equal(batch[name].lengths, batch["responses"].lengths.astype(np.int64) * teacher.top_k):
            raise ValueError(
                f"column {name!r}: expected {teacher.top_k} values (teacher.top_k) for each response token"
            )
    check_ids(batch["teacher_top_ids"], "teacher_top_ids", model)
    log_probs = batch["teacher_top_log_probs"]
    refuse(log_probs, log_probs.values > _MAX_LOG_PROB, "teacher_top_log_probs", "a log-prob of at most 0")


def distillation_loss(
    outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor], teacher: TeacherConfig
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the loss of each token, [N] in nats, and metrics [N]; `teacher.coef` is not in it.

        signal loss             kl_estimate(log p, log q, loss_type)
        signal top_k, forward   max(0, sum over K of q (log q - log p))
        signal top_k, reverse   sum over K and the rest of p (log p - log q), the rest counted as one token

    p are the policy's probabilities and q the teacher's. Log-probs are at least `log_prob_min`, and the loss is cut off
    at +-`max_abs`. The forward KL is verl's forward_kl_topk. The reverse one has the rest, because without it the
    policy would lower the loss by taking probability away from all K tokens.
    """

    def bounded(log_probs: Tensor) -> Tensor:
        return log_probs if teacher.log_prob_min is None else log_probs.clamp(min=teacher.log_prob_min)

    metrics: dict[str, Tensor] = {}
    if teacher.signal == "loss":
        of_teacher_N = bounded(columns["teacher_log_probs"])
        loss_N = kl_estimate(bounded(outputs["log_probs"]), of_teacher_N, teacher.loss_type)
    else:
        of_policy_NK = outputs["top_log_probs"]
        of_teacher_NK = columns["teacher_top_log_probs"]
        mass_p = of_policy_NK.logsumexp(-1)
        mass_q = of_teacher_NK.logsumexp(-1)
        metrics = {"distillation/student_mass": mass_p.detach().exp(), "distillation/teacher_mass": mass_q.exp()}
        log_p = bounded(of_policy_NK)
        log_q = bounded(of_teacher_NK)
        if teacher.top_k_kl == "forward":
            loss_N = (log_q.exp() * (log_q - log_p)).sum(-1).clamp(min=0.0)
        else:
            rest_p, rest_q = (bounded(_log_rest(mass_N)) for mass_N in (mass_p, mass_q))
            loss_N = (log_p.exp() * (log_p - log_q)).sum(-1) + rest_p.exp() * (rest_p - rest_q)
    if teacher.max_abs is not None:
        loss_N = loss_N.clamp(-teacher.max_abs, teacher.max_abs)
    return loss_N, metrics


def _log_rest(log_mass_N: Tensor) -> Tensor:
    """Returns log(1 - exp(log_mass)), [N]: the log-prob of all tokens that are not among the K."""
    return torch.log(-torch.expm1(log_mass_N.clamp(max=_MAX_LOG_MASS)))
