"""Computes the actor's loss: the sum of policy loss, entropy bonus, and KL to the reference policy and to a teacher.

    L = sum over the tokens of a mini-batch of
            w (m c policy_loss - entropy_coeff entropy + kl_loss_coef kl + teacher.coef distillation_loss)

w is the weight of a token, c its rollout_is_weights; m is 0 where its policy loss is rejected. w is decided in
engine/batching: `plan_mini_batches` takes it from `row_weights`, by loss_agg_mode and totals of the whole mini-batch,
and it is 0 outside of the response_mask. So L is a plain sum, and does not depend on the split into micro-batches and
ranks. If it looks at sequences (`PolicyLossConfig.looks_at_rows`), rows are whole in a micro-batch.

Legend: N response tokens of all rows of a micro-batch, packed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.actor.losses.distillation import distillation_loss
from services.actor.losses.kl import kl_estimate
from services.actor.losses.policy_loss import PolicyTokens
from services.actor.losses.registry import find_policy_loss
from services.actor.losses.rejection import rejected
from services.engine.batching.packing import ResponseTokens
from services.engine.token_metrics import LossOutput
from services.engine.train_engine import TokenLoss
from splitppo.config import ActorConfig
from splitppo.config.sections.teacher import TeacherConfig


def actor_loss(config: ActorConfig, teacher: TeacherConfig | None = None) -> TokenLoss:
    """Makes the function that computes the actor's loss and metrics for one micro-batch.

    The loss reads the outputs log_probs and entropy and the columns advantages, old_log_probs and, with use_kl_loss,
    ref_log_probs. Without old_log_probs the policy counts as the one that sampled (ratio 1). Where there are
    rollout_is_weights, they multiply the policy loss of each token, and neither entropy nor KL; with
    policy_loss.rollout_rs tokens that are rejected have no policy loss, but still count in every denominator. `teacher`
    is given if its signal is a term of the loss, which reads the columns of the teacher, too.

    The metrics are pg_loss, kl_loss and distillation/loss, weighted as the loss is, and the token means entropy, ppo_kl
    (minus the log of the probability ratio) and those of the policy loss and of the distillation.

    Raises:
        ValueError: no policy loss has the configured name.
    """
    policy_loss = find_policy_loss(config, config.policy_loss.loss_mode)

    def loss(outputs: Mapping[str, Tensor], tokens: ResponseTokens) -> LossOutput:
        """Computes the loss of a micro-batch, with its metrics: L of the module's docstring, term by term."""
        columns = tokens.columns
        weights_N = tokens.weights
        log_probs_N = outputs["log_probs"]
        entropy_N = outputs["entropy"]
        old_log_probs_N = columns.get("old_log_probs", log_probs_N.detach())  # without the column the ratio is 1
        policy_tokens = PolicyTokens(
            log_probs_N,
            old_log_probs_N,
            columns["advantages"],
            mask=tokens.mask,
            row_index=tokens.row_index,
            selected=tokens.selected,
        )
        token_loss_N, metrics = policy_loss(policy_tokens, config)
        if "rollout_is_weights" in columns:
            token_loss_N = token_loss_N * columns["rollout_is_weights"]
        if rejections := config.policy_loss.rejections:
            rejected_N = rejected(policy_tokens, rejections)
            token_loss_N = torch.where(rejected_N, 0.0, token_loss_N)
            metrics = {**metrics, "rollout_rs_masked_fraction": rejected_N.float()}
        total = (weights_N * token_loss_N).sum()
        sums = {"pg_loss": total}
        if config.entropy_coeff:
            total = total - config.entropy_coeff * (weights_N * entropy_N).sum()
        if config.use_kl_loss:
            kl_N = kl_estimate(log_probs_N, columns["ref_log_probs"], config.kl_loss_type)
            sums["kl_loss"] = (weights_N * kl_N).sum()
            total = total + config.kl_loss_coef * sums["kl_loss"]
        if teacher is not None:
            distillation_N, teacher_metrics = distillation_loss(outputs, columns, teacher)
            sums["distillation/loss"] = (weights_N * distillation_N).sum()
            total = total + teacher.coef * sums["distillation/loss"]
            metrics = {**metrics, **teacher_metrics}
        return LossOutput(total, sums, {**metrics, "ppo_kl": -policy_tokens.log_ratio, "entropy": entropy_N})

    return loss
