"""The actor's loss per response token: policy loss, entropy bonus, KL to the reference.

A token's weight says how it enters the mini-batch's loss, so that the loss is a plain weighted sum, whatever the split
into micro-batches and ranks. Rows are whole in a micro-batch: a loss may also look at sequences.

Legend: N response tokens of all rows of a micro-batch, packed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from services.actor.losses.kl import kl_estimate
from services.actor.losses.policy_loss import PolicyTokens
from services.actor.losses.registry import find_policy_loss
from services.engine.batching.packing import ResponseTokens
from services.engine.token_metrics import LossOutput
from services.engine.train_engine import TokenLoss
from splitppo.config import ActorConfig
from splitppo.config.policy_loss import COVARIANCE_LOSSES


@dataclass(frozen=True)
class LossTerms:
    """What of the loss may change from step to step.

    Attributes:
        loss_mode: name of the policy loss.
        entropy_coeff: weight of the entropy bonus.
        kl_loss_coef: weight of the KL to the reference; None: the loss has no such term.
    """

    loss_mode: str
    entropy_coeff: float
    kl_loss_coef: float | None

    @classmethod
    def of(cls, config: ActorConfig) -> Self:
        """As the section has them."""
        kl_loss_coef = config.kl_loss_coef if config.use_kl_loss else None
        return cls(config.policy_loss.loss_mode, config.entropy_coeff, kl_loss_coef)


def actor_loss(config: ActorConfig, terms: LossTerms) -> TokenLoss:
    """The actor's loss: policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy, reference).

    The loss reads the outputs log_probs and entropy and the columns advantages, old_log_probs, with a KL term
    ref_log_probs, with a covariance loss selected_tokens. Without old_log_probs the policy counts as the one that
    sampled (ratio 1, on-policy shortcut). Where there are rollout_is_weights, they multiply the policy loss of each
    token, and neither entropy nor KL. Its metrics are pg_loss and kl_loss, weighted as the loss is, and the token means
    entropy, ppo_kl (minus the log of the probability ratio) and what the policy loss adds.

    Raises:
        ValueError: there is no such policy loss.
    """
    policy_loss = find_policy_loss(config, terms.loss_mode)
    selects_tokens = terms.loss_mode in COVARIANCE_LOSSES

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
        if terms.entropy_coeff:
            total = total - terms.entropy_coeff * (weights_N * entropy_N).sum()
        if terms.kl_loss_coef is not None:
            kl_N = kl_estimate(log_probs_N, columns["ref_log_probs"], config.kl_loss_type)
            sums["kl_loss"] = (weights_N * kl_N).sum()
            total = total + terms.kl_loss_coef * sums["kl_loss"]
        return LossOutput(total, sums, {**metrics, "ppo_kl": -seen.log_ratio, "entropy": entropy_N})

    return loss
