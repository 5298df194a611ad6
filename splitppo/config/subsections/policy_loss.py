"""The configuration section `actor.policy_loss`: the name of the policy loss, and the settings of single losses."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from splitppo.config.section import Section
from splitppo.config.subsections.rejection import Rejection, WeightBounds, parse_rejections, parse_weight_bounds
from splitppo.config_error import did_you_mean
from splitppo.user_file import read_parameters

# The functions are in services/actor/losses/registry.py.
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
# Losses of which each token's depends on all tokens of its response.
LOSSES_OF_ROWS = ("gspo", "geo_mean")
# Losses that select tokens of the whole mini-batch, by the old log-probs.
COVARIANCE_LOSSES = ("clip_cov", "kl_cov")
# Losses whose papers take the mean over tokens, then over sequences.
SEQUENCE_LOSSES = ("gspo", "geo_mean", "sapo")


class PolicyLossConfig(Section):
    """The loss of the policy, by name, and the settings of single losses. The names of the keys are verl's."""

    custom_path: Path | None = None
    """A Python file with losses of your own, which the workers import. loss_mode names a function of it. null: only
    built-in losses."""

    loss_mode: str = Field("vanilla", description=f"The loss: {', '.join(LOSS_MODES)}, or a function of custom_path.")
    clip_cov_ratio: float = Field(0.0002, gt=0.0, le=1.0)
    """For clip_cov: the share of tokens that are left out of the loss."""

    clip_cov_lb: float = 1.0
    """For clip_cov: the covariance above which tokens may be left out."""

    clip_cov_ub: float = 5.0
    """For clip_cov: the covariance below which tokens may be left out."""

    kl_cov_ratio: float = Field(0.0002, gt=0.0, le=1.0)
    """For kl_cov: the share of tokens that have the KL penalty."""

    ppo_kl_coef: float = Field(0.1, ge=0.0)
    """For kl_cov: the weight of the KL penalty. (The paper: 1.)"""

    tau_pos: float = Field(1.0, gt=0.0)
    """For sapo: the temperature of the gate for tokens with a positive advantage."""

    tau_neg: float = Field(1.05, gt=0.0)
    """For sapo: the temperature of the gate for all other tokens."""

    dro_beta: float = Field(0.1, gt=0.0)
    """For dro: the weight of the squared log-ratio."""

    reinforce_is: Literal["token", "sequence"] | None = None
    """For reinforce: the importance weight of a token, which is its new probability over the old one (token), or the
    product of these ratios over the response (sequence). null: no weights. With algorithm.rollout_correction.loss_type
    reinforce, the default is rollout_is of that section."""

    reinforce_is_threshold: WeightBounds = 2.0
    """For reinforce: the largest weight; larger weights are truncated to it. Two bounds, "0.5_4.0" in quotes: a weight
    outside of them is 0. With algorithm.rollout_correction.loss_type reinforce, the default is rollout_is_threshold of
    that section."""

    rollout_rs: str | None = None
    """The criteria by which tokens are rejected in the update: a rejected token has no policy loss. Set
    algorithm.rollout_correction.rollout_rs instead, which fills this key if bypass_mode is on."""

    rollout_rs_threshold: str | float | None = None
    """The bounds of rollout_rs. Set algorithm.rollout_correction.rollout_rs_threshold instead, which fills this key if
    bypass_mode is on."""

    def _check_keys(self) -> None:
        self.check_loss_mode(self.loss_mode)
        _ = self.rejections
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(
                f"clip_cov_lb must be less than clip_cov_ub, got {self.clip_cov_lb} and {self.clip_cov_ub}"
            )

    @property
    def needs_old_log_probs(self) -> bool:
        """True if the loss reads old log-probs even if the policy has not changed since it sampled the responses."""
        return self.loss_mode in COVARIANCE_LOSSES

    @property
    def looks_at_rows(self) -> bool:
        """True if the loss of a token depends on other tokens of its response, which then all share a micro-batch.

        Otherwise a response with several contexts is divided. It is True for users' losses, since they may depend on
        sums over rows.
        """
        is_own = self.loss_mode not in LOSS_MODES
        has_sequence_weights = self.loss_mode == "reinforce" and self.reinforce_is == "sequence"
        rejects_rows = any(rejection.over != "token" for rejection in self.rejections)
        return is_own or self.loss_mode in LOSSES_OF_ROWS or has_sequence_weights or rejects_rows

    @property
    def reinforce_bounds(self) -> tuple[float | None, float]:
        """The (lower, upper) bounds of the importance weights in the loss `reinforce`.

        Lower is None if larger weights are truncated to the upper bound.
        """
        return parse_weight_bounds(self.reinforce_is_threshold)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The criteria that a token must pass to have a policy loss; empty if no token is rejected."""
        return parse_rejections(self.rollout_rs, self.rollout_rs_threshold)

    def check_loss_mode(self, name: str) -> None:
        """Checks that `name` is a built-in loss, or may be a function of `custom_path`; else raises ValueError."""
        if name in LOSS_MODES or (self.custom_path is not None and name.isidentifier()):
            return
        raise ValueError(
            f"loss_mode: expected one of {', '.join(LOSS_MODES)}, or with custom_path a function of that file,"
            f" got {name!r}{did_you_mean(name, LOSS_MODES)}"
        )

    def check_file(self) -> None:
        """Checks that the Python file `custom_path` defines the function that `loss_mode` names.

        A built-in loss is not looked for. The file is read and not run. Raises ConfigError.
        """
        if self.custom_path is not None and self.loss_mode not in LOSS_MODES:
            path_key, name_key = (f"key 'actor.policy_loss.{name}'" for name in ("custom_path", "loss_mode"))
            read_parameters(self.custom_path, self.loss_mode, path_key=path_key, name_key=name_key)
