"""Finds policy losses by name (actor.policy_loss.loss_mode): built-in ones, and those in a user's file."""

import functools
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from services.actor.losses.clip_losses import geo_mean, gspo, sapo, vanilla
from services.actor.losses.covariance_losses import clip_cov, kl_cov, prepare_clip_cov, prepare_kl_cov
from services.actor.losses.gradient_losses import cispo, dppo_kl, dppo_tv, dro, gpg, reinforce
from services.actor.losses.policy_loss import PolicyLoss, PolicyTokens
from splitppo.config import ActorConfig
from splitppo.config.subsections.policy_loss import PolicyLossConfig
from splitppo.user_file import describe, load_from_file

_PATH_KEY = "actor.policy_loss.custom_path"
_NAME_KEY = "actor.policy_loss.loss_mode"


# The names are those of splitppo/config/subsections/policy_loss.py.
POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    loss.of_tokens.__name__: loss
    for loss in (
        *map(PolicyLoss, (vanilla, gspo, geo_mean, cispo, sapo, gpg, dppo_tv, dppo_kl, dro, reinforce)),
        PolicyLoss(clip_cov, prepare_clip_cov, prepared_from=("old_log_probs", "seeds")),
        PolicyLoss(kl_cov, prepare_kl_cov, prepared_from=("old_log_probs", "seeds")),
    )
}


def find_policy_loss(config: ActorConfig, loss_mode: str) -> PolicyLoss:
    """Finds the policy loss of a name: built in, or the function of this name in file policy_loss.custom_path.

    Raises:
        ValueError: no policy loss has this name, or importing the file fails; one sentence.
    """
    config.policy_loss.check_loss_mode(loss_mode)
    if loss_mode in POLICY_LOSSES:
        return POLICY_LOSSES[loss_mode]
    assert config.policy_loss.custom_path is not None
    return _own_loss(config.policy_loss.custom_path, loss_mode)


def try_policy_loss(config: ActorConfig) -> None:
    """Checks a user's own policy loss early: computes its gradient on a few made-up tokens.

    Raises:
        ValueError: as `find_policy_loss`, or the function is no policy loss; one sentence.
    """
    section = config.policy_loss
    loss = find_policy_loss(config, section.loss_mode)
    if section.loss_mode in POLICY_LOSSES:
        return
    log_probs_N = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    tokens = PolicyTokens(
        log_probs=log_probs_N,
        old_log_probs=torch.tensor([-1.1, -0.4, -2.0]),
        advantages=torch.tensor([1.0, -1.0, 0.5]),
        mask=torch.tensor([True, False, True]),
        row_index=torch.tensor([0, 0, 1]),
    )
    try:
        loss_N, _ = loss(tokens, config)
        torch.autograd.grad(loss_N[tokens.mask].sum(), log_probs_N)
    except Exception as error:  # whatever a user's code may raise
        trying = f"{section.custom_path}: trying {section.loss_mode!r} failed"
        raise ValueError(f"key '{_NAME_KEY}': {trying}: {describe(error)}") from error


@functools.cache  # the file is imported once for each loss, also if it has a state
def _own_loss(path: Path, name: str) -> PolicyLoss:
    """Loads a policy loss from a user's file; the loss checks what the function returns, and prefixes its metrics.

    A function may return its loss [N] alone, or with a mapping of metrics [N]. Metric `name` becomes
    `policy_loss/name`. It may use sums over rows, so it sees whole rows.

    Raises:
        ValueError: by this function, the file defines no such loss; by the loss, it returned something of another
            shape.
    """
    PolicyLossConfig(custom_path=path, loss_mode=name).check_file()  # a name that the file only imports is no loss
    function = load_from_file(path, name, path_key=_PATH_KEY, name_key=_NAME_KEY)

    def checked(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
        returned = function(tokens, config)
        loss_N, metrics = returned if isinstance(returned, tuple) else (returned, {})
        for values in (loss_N, *metrics.values()):
            if not isinstance(values, Tensor) or values.shape != tokens.log_probs.shape:
                shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(f"expected one number per token, {list(tokens.log_probs.shape)}, got {shape}")
        return loss_N, {f"policy_loss/{metric}": values_N for metric, values_N in metrics.items()}

    return PolicyLoss(checked)
