"""The section `actor.policy_loss`: which loss the policy has, and what single losses have beside the clip range."""

import difflib
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from splitppo.config.section import Section
from splitppo.user_file import read_functions

# The functions are services/actor/losses/registry.py's.
LOSS_MODES = (
    "vanilla",
    "gspo",
    "geo_mean",
    "cispo",
    "sapo",
    "clip_cov",
    "kl_cov",
    "gpg",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "reinforce",
)
# Those that select tokens of the whole mini-batch, by the old log-probs.
COVARIANCE_LOSSES = ("clip_cov", "kl_cov")
# They mark a token by one bit of an int32 for each PPO epoch.
MAX_COVARIANCE_EPOCHS = 31
# Those whose papers take the mean over tokens, then over sequences.
SEQUENCE_LOSSES = ("gspo", "geo_mean", "sapo")


class PolicyLossConfig(Section):
    """The policy's loss, by name; keys are verl's."""

    custom_path: Path | None = Field(
        None,
        description="Python file, for the workers to import, with losses of your own: functions named in loss_mode",
    )
    loss_mode: str = Field("vanilla", description=f"{' | '.join(LOSS_MODES)}, or a function of custom_path")
    clip_cov_ratio: float = Field(0.0002, gt=0.0, le=1.0, description="clip_cov: share of tokens that are left out")
    clip_cov_lb: float = Field(1.0, description="clip_cov: covariance over which tokens are drawn")
    clip_cov_ub: float = Field(5.0, description="clip_cov: covariance under which they are")
    kl_cov_ratio: float = Field(0.0002, gt=0.0, le=1.0, description="kl_cov: share of tokens with the KL penalty")
    ppo_kl_coef: float = Field(0.1, ge=0.0, description="kl_cov: weight of that penalty (the paper: 1)")
    tau_pos: float = Field(1.0, gt=0.0, description="sapo: temperature of the gate where the advantage is positive")
    tau_neg: float = Field(1.05, gt=0.0, description="sapo: where it is not")
    dro_beta: float = Field(0.1, gt=0.0, description="dro: weight of the squared log-ratio")
    reinforce_is: Literal["token", "sequence"] | None = Field(
        None,
        description="reinforce: importance weights, the new probability over the old one, of each token or their"
        " product over the response; default: algorithm.rollout_correction.rollout_is, with its loss_type reinforce",
    )
    reinforce_is_threshold: float = Field(
        2.0, ge=1.0, description="reinforce: largest weight; default likewise: rollout_is_threshold"
    )

    @model_validator(mode="after")
    def _the_loss_is_known(self) -> Self:
        self.check_loss_mode(self.loss_mode)
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(
                f"clip_cov_lb must be less than clip_cov_ub, got {self.clip_cov_lb} and {self.clip_cov_ub}"
            )
        return self

    def check_loss_mode(self, name: str) -> None:
        """ValueError if no loss can have that name; the sentence lists the known ones, and the nearest."""
        if name in LOSS_MODES or (self.custom_path is not None and name.isidentifier()):
            return
        nearest = difflib.get_close_matches(name, LOSS_MODES, n=1)
        suggestion = f", did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"loss_mode: expected one of {', '.join(LOSS_MODES)}, or with custom_path a function of that file,"
            f" got {name!r}{suggestion}"
        )

    def check_file(self) -> None:
        """ValueError if the file defines no function loss_mode, unless that is built in; the file is only read."""
        name = self.loss_mode
        if name in LOSS_MODES or self.custom_path is None:
            return
        try:
            functions = read_functions(self.custom_path)
        except ValueError as error:
            raise ValueError(f"key 'actor.policy_loss.custom_path': {error}") from error
        if name not in functions:
            known = f"it has {', '.join(functions)}" if functions else "it has none"
            raise ValueError(f"key 'actor.policy_loss.loss_mode': {self.custom_path} has no function {name!r}; {known}")
