"""Policy losses by the names that actor.policy_loss.loss_mode may take."""

from collections.abc import Mapping

from services.actor.losses.clip_losses import vanilla
from services.actor.losses.policy_loss import PolicyLoss
from splitppo.config import ActorConfig

POLICY_LOSSES: Mapping[str, PolicyLoss] = {"vanilla": vanilla}


def find_policy_loss(config: ActorConfig, loss_mode: str) -> PolicyLoss:
    """The loss of that name.

    Raises:
        ValueError: there is none; the sentence lists the known ones.
    """
    config.policy_loss.check_loss_mode(loss_mode)
    return POLICY_LOSSES[loss_mode]
