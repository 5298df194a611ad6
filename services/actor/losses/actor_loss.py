"""The actor's loss per response token: policy loss, entropy bonus, KL to the reference.

A token's weight says how it enters the mini-batch's loss, so that the loss is a plain weighted sum, whatever the split
into micro-batches and ranks. Rows are whole in a micro-batch: a loss may also look at sequences.

Legend: N response tokens of all rows of a micro-batch, packed.
"""

from collections.abc import Mapping

from torch import Tensor

from services.actor.losses.kl import kl_estimate
from services.actor.losses.policy_loss import PolicyTokens
from services.actor.losses.registry import find_policy_loss
from services.engine.batching.packing import ResponseTokens
from services.engine.token_metrics import LossOutput
from services.engine.train_engine import TokenLoss
from splitppo.config import ActorConfig
from splitppo.config.policy_loss import COVARIANCE_LOSSES


def actor_loss(config: ActorConfig) -> TokenLoss:
    """The actor's loss: policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy, reference).

    The loss reads the outputs log_probs and entropy and the columns advantages, old_log_probs, with a KL term
    ref_log_probs, with a covariance loss selected_tokens. Without old_log_probs the policy counts as the one that
    sampled (ratio 1, on-policy shortcut). Where there are rollout_is_weights, they multiply the policy loss of each
    token, and neither entropy nor KL. Its metrics are pg_loss and kl_loss, weighted as the loss is, and the token means
    entropy, ppo_kl (minus the log of the probability ratio) and what the policy loss adds.

    Raises:
        ValueError: there is no such policy loss.
    """
    loss_mode = config.policy_loss.loss_mode
    policy_loss, selects_tokens = find_policy_loss(config, loss_mode), loss_mode in COVARIANCE_LOSSES

    def loss(outputs: Mapping[str, Tensor], tokens: ResponseTokens) -> LossOutput:
        columns, weights_N = tokens.columns, tokens.weights
        log_probs_N, entropy_N = outputs["log_probs"], outputs["entropy"]
        old_log_probs_N = columns.get("old_log_probs", log_probs_N.detach())
        seen = PolicyTokens(
            log_probs_N,
            old_log_probs_N,
            columns["advantages"],
            mask=tokens.mask,
            row_index=tokens.row_index,
            selected=((columns["selected_tokens"] >> tokens.epoch) & 1).bool() if selects_tokens else None,
        )
        token_loss_N, metrics = policy_loss(seen, config)
        if "rollout_is_weights" in columns:
            token_loss_N = token_loss_N * columns["rollout_is_weights"]
        total = (weights_N * token_loss_N).sum()
        sums = {"pg_loss": total}
        if config.entropy_coeff:
            total = total - config.entropy_coeff * (weights_N * entropy_N).sum()
        if config.use_kl_loss:
            kl_N = kl_estimate(log_probs_N, columns["ref_log_probs"], config.kl_loss_type)
            sums["kl_loss"] = (weights_N * kl_N).sum()
            total = total + config.kl_loss_coef * sums["kl_loss"]
        return LossOutput(total, sums, {**metrics, "ppo_kl": -seen.log_ratio, "entropy": entropy_N})

    return loss
