"""Policy losses by the names that actor.policy_loss.loss_mode may take: those that are built in, and a user's own."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.actor.losses.clip_losses import sapo, vanilla
from services.actor.losses.covariance_losses import clip_cov, kl_cov
from services.actor.losses.divergence_losses import dppo_kl, dppo_tv
from services.actor.losses.gradient_losses import cispo, dro, gpg, reinforce
from services.actor.losses.policy_loss import PolicyLoss, PolicyTokens
from services.actor.losses.sequence_losses import geo_mean, gspo
from splitppo.config import ActorConfig
from splitppo.user_file import describe, load_from_file

# The names are those of splitppo/config/policy_loss.py.
POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    function.__name__: function
    for function in (
        vanilla,
        gspo,
        geo_mean,
        cispo,
        sapo,
        clip_cov,
        kl_cov,
        gpg,
        dppo_tv,
        dppo_kl,
        dro,
        reinforce,
    )
}


def find_policy_loss(config: ActorConfig, loss_mode: str) -> PolicyLoss:
    """The loss of that name: built in, or the function of this name in the file policy_loss.custom_path.

    Raises:
        ValueError: there is none, importing the file fails, or the function is no policy loss; one sentence.
    """
    section = config.policy_loss
    section.check_loss_mode(loss_mode)
    if loss_mode in POLICY_LOSSES:
        return POLICY_LOSSES[loss_mode]
    assert section.custom_path is not None
    section.check_file(loss_mode)  # what the file only imports is none
    return _own_loss(section.custom_path, loss_mode, config)


@functools.cache  # the file is imported once, whatever it keeps in its module
def _own_loss(path: Path, name: str, config: ActorConfig) -> PolicyLoss:
    keys = {"path_key": "actor.policy_loss.custom_path", "name_key": "actor.policy_loss.loss_mode"}
    function = load_from_file(path, name, **keys)

    def checked(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss_N, metrics = _loss_and_metrics(function(tokens, config))
        for values in (loss_N, *metrics.values()):
            if not isinstance(values, Tensor) or values.shape != tokens.log_probs.shape:
                found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(f"expected one number per token, {list(tokens.log_probs.shape)}, got {found}")
        return loss_N, {f"policy_loss/{metric}": values_N for metric, values_N in metrics.items()}

    try:
        _try_out(checked, config)
    except Exception as error:  # whatever a user's code may raise
        raise ValueError(f"key '{keys['name_key']}': {path}: trying {name!r} failed: {describe(error)}") from error
    return checked


def _loss_and_metrics(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """Of what a user's loss has returned: the loss alone, or with metrics."""
    return returned if isinstance(returned, tuple) else (returned, {})


def _try_out(loss: PolicyLoss, config: ActorConfig) -> None:
    """Takes the gradient of a loss on two rows of made-up tokens, one of which does not count."""
    log_probs_N = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    tokens = PolicyTokens(
        log_probs=log_probs_N,
        old_log_probs=torch.tensor([-1.1, -0.4, -2.0]),
        advantages=torch.tensor([1.0, -1.0, 0.5]),
        mask=torch.tensor([True, False, True]),
        row_index=torch.tensor([0, 0, 1]),
    )
    loss_N, _ = loss(tokens, config)
    torch.autograd.grad(loss_N[tokens.mask].sum(), log_probs_N)
