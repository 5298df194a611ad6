"""The section `actor.policy_loss`: the loss of the policy, and settings of single losses beside the clip range."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from splitppo.config.section import Section, did_you_mean
from splitppo.config.subsections.rejection import Rejection, WeightBounds, parse_rejections, parse_weight_bounds
from splitppo.config_error import ConfigError
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
# Those whose papers take the mean over tokens, then over sequences.
SEQUENCE_LOSSES = ("gspo", "geo_mean", "sapo")


class PolicyLossConfig(Section):
    """The policy's loss, by name; keys are verl's."""

    custom_path: Path | None = None
    """Python file, for the workers to import, with losses of your own: functions named in loss_mode"""

    loss_mode: str = Field("vanilla", description=f"{' | '.join(LOSS_MODES)}, or a function of custom_path")
    clip_cov_ratio: float = Field(0.0002, gt=0.0, le=1.0)
    """clip_cov: share of tokens that are left out"""

    clip_cov_lb: float = 1.0
    """clip_cov: covariance over which tokens are drawn"""

    clip_cov_ub: float = 5.0
    """clip_cov: covariance under which they are"""

    kl_cov_ratio: float = Field(0.0002, gt=0.0, le=1.0)
    """kl_cov: share of tokens with the KL penalty"""

    ppo_kl_coef: float = Field(0.1, ge=0.0)
    """kl_cov: weight of that penalty (the paper: 1)"""

    tau_pos: float = Field(1.0, gt=0.0)
    """sapo: temperature of the gate where the advantage is positive"""

    tau_neg: float = Field(1.05, gt=0.0)
    """sapo: where it is not"""

    dro_beta: float = Field(0.1, gt=0.0)
    """dro: weight of the squared log-ratio"""

    reinforce_is: Literal["token", "sequence"] | None = None
    """reinforce: importance weights, the new probability over the old one, of each token or their product over the
    response; default: algorithm.rollout_correction.rollout_is, with its loss_type reinforce"""

    reinforce_is_threshold: WeightBounds = 2.0
    """reinforce: largest weight, or bounds; default likewise: rollout_is_threshold"""

    rollout_rs: str | None = None
    """tokens without a policy loss, by the policy in training over the old one: rollout_rs of
    algorithm.rollout_correction with its bypass_mode, and set there"""

    rollout_rs_threshold: str | float | None = None
    """likewise rollout_rs_threshold"""

    def _check_keys(self) -> None:
        self.check_loss_mode(self.loss_mode)
        _ = self.rejections
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(
                f"clip_cov_lb must be less than clip_cov_ub, got {self.clip_cov_lb} and {self.clip_cov_ub}"
            )

    @property
    def needs_old_log_probs(self) -> bool:
        """True if the loss reads the old log-probs also where the policy has not changed since it sampled."""
        return self.loss_mode in COVARIANCE_LOSSES

    @property
    def reinforce_bounds(self) -> tuple[float | None, float]:
        """The (lower, upper) bounds of reinforce's weights; without a lower bound larger weights are truncated."""
        return parse_weight_bounds(self.reinforce_is_threshold)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The criteria that a token must pass to have a policy loss."""
        return parse_rejections(self.rollout_rs, self.rollout_rs_threshold)

    def check_loss_mode(self, name: str) -> None:
        """Checks that a loss can have that name; ValueError lists the known names, and the nearest."""
        if name in LOSS_MODES or (self.custom_path is not None and name.isidentifier()):
            return
        raise ValueError(
            f"loss_mode: expected one of {', '.join(LOSS_MODES)}, or with custom_path a function of that file,"
            f" got {name!r}{did_you_mean(name, LOSS_MODES)}"
        )

    def check_file(self) -> None:
        """Checks that the file defines the function loss_mode, unless that is built in; the file is only read."""
        name, path = self.loss_mode, self.custom_path
        if name in LOSS_MODES or path is None:
            return
        try:
            functions = read_functions(path)
        except ValueError as error:
            raise ConfigError(f"key 'actor.policy_loss.custom_path': {error}") from error
        if name not in functions:
            known = f"it has {', '.join(functions) or 'none'}"
            raise ConfigError(f"key 'actor.policy_loss.loss_mode': {path} has no function {name!r}; {known}")
