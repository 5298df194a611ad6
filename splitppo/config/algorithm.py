"""The section `algorithm`."""

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from splitppo.config.estimator import EstimatorConfig, nearest
from splitppo.config.filter_groups import FilterGroupsConfig
from splitppo.config.phases import AdaptiveEntropy, Phase, check_apart
from splitppo.config.rejection import Rejection, parse_rejections
from splitppo.config.section import OneOrMany, PositiveInt, Section

# verl's names and the short ones; the functions are controller/ppo/kl.py's. A "+" says something of the gradient, which
# a KL in the reward has not.
_KL_NAMES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_ESTIMATOR_NAMES = (*_KL_NAMES, *(f"{name}+" for name in _KL_NAMES))


def _one_of(names: Collection[str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"expected one of {', '.join(names)}{nearest(name, names)}")
        return name

    return AfterValidator(check)


KlEstimator = Annotated[str, _one_of(KL_ESTIMATOR_NAMES)]


def _switch_or_auto(value: object) -> object:
    if value != "auto" and not isinstance(value, bool):
        raise ValueError("expected auto, true or false")
    return value


class RolloutCorrectionConfig(Section):
    """What is done about tokens on which backend's and trainer's probabilities differ; names are verl's.

    r is the trainer's probability of a sampled token over the rollout backend's.
    """

    bypass_mode: Annotated[bool | Literal["auto"], BeforeValidator(_switch_or_auto)] = Field(
        "auto",
        description="the log-probs that the rollout backend reports are the old ones, and the trainer computes none;"
        " auto: where both compute alike (rollout.backend hf, actor.dtype fp32) and nothing is corrected",
    )
    loss_type: Literal["ppo_clip", "reinforce"] = Field(
        "ppo_clip",
        description="with bypass_mode: ppo_clip is the loss that actor.policy_loss names; reinforce is that loss, and"
        " rollout_is then weighs its tokens by the policy in training over the rollout backend",
    )
    rollout_is: Literal["token", "sequence"] | None = Field(
        None, description="importance weights on the policy loss: r of each token, or its product over the response"
    )
    rollout_is_threshold: float = Field(2.0, ge=1.0, description="largest weight; larger ones are truncated to it")
    rollout_is_batch_normalize: bool = Field(False, description="divide the weights by their mean over the batch")
    rollout_rs: str | None = Field(
        None,
        description="what is rejected, by k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r; a comma between several:"
        " token_k{1,2,3} rejects tokens, seq_{sum,mean}_k{1,2,3} and seq_max_k{2,3} whole responses",
    )
    rollout_rs_threshold: str | float | None = Field(
        None,
        description="k1: bounds of 1 / r, the rollout backend's probability over the trainer's: \"0.5_2.0\" in quotes,"
        " or the upper one, whose reciprocal is the lower one; k2, k3: upper bound, nats",
    )

    @model_validator(mode="after")
    def _thresholds_fit(self) -> "RolloutCorrectionConfig":
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            raise ValueError("rollout_is_batch_normalize is set, but rollout_is is not")
        if self.loss_type == "reinforce" and (self.bypass_mode is False or self.rollout_is_batch_normalize):
            raise ValueError(
                "loss_type reinforce is the loss of bypass_mode, whose weights are not normalised: expected bypass_mode"
                " true or auto, and rollout_is_batch_normalize false"
            )
        if self.bypasses and self.is_active:
            raise ValueError(
                "bypass_mode takes the rollout backend's log-probs for the trainer's, which leaves nothing to correct:"
                " set bypass_mode to false, or rollout_is and rollout_rs to null"
            )
        _ = self.rejections
        return self

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The criteria that a token must pass; none: nothing is rejected."""
        return parse_rejections(self.rollout_rs, self.rollout_rs_threshold)

    @property
    def bypasses(self) -> bool:
        """Whether the rollout backend's log-probs are the old ones; `Config` resolves auto."""
        return self.bypass_mode is True

    @property
    def is_active(self) -> bool:
        """Whether anything is weighted or rejected before the update; what differs is measured in any case."""
        return (self.rollout_is is not None and self.loss_type != "reinforce") or self.rollout_rs is not None


class AlgorithmConfig(EstimatorConfig):
    """Advantages, the KL penalty in the reward, and the correction of rollouts."""

    use_kl_in_reward: bool = Field(False, description="subtract kl_coef * KL from every token's reward")
    kl_penalty: KlEstimator = Field(
        "kl",
        description="kl (k1) | abs | mse (k2) | low_var_kl (k3); with + the same: only values count",
    )
    kl_coef: float = Field(0.001, ge=0.0, description="initial coefficient of the KL in the reward")
    kl_ctrl: Literal["fixed", "adaptive"] = Field("fixed", description="adaptive: Ziegler et al., 2019")
    kl_target: float = Field(0.1, gt=0.0, description="adaptive: KL to hold, nats")
    kl_horizon: PositiveInt = Field(10_000, description="adaptive: samples over which the coefficient moves")
    mask_truncated_completions: bool = Field(
        False,
        description="nothing is learned from responses that data.max_response_length has cut off (DAPO's overlong"
        " filtering); they still count in their group's baseline",
    )
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    adaptive_entropy: AdaptiveEntropy = AdaptiveEntropy()
    phases: Annotated[tuple[Phase, ...], OneOrMany] = Field(
        (), description="[{from_step, to_step, ...}, ...]: steps in which losses and coefficients are others"
    )

    @model_validator(mode="after")
    def _no_step_has_two_phases(self) -> "AlgorithmConfig":
        check_apart(self.phases)
        return self

    def phase_number(self, step: int) -> int:
        """Which of the phases a step belongs to, from 1; 0: to none."""
        return next((number for number, phase in enumerate(self.phases, start=1) if phase.holds_at(step)), 0)

    @model_validator(mode="after")
    def _the_kl_in_the_reward_counts(self) -> "AlgorithmConfig":
        if self.use_kl_in_reward and self.adv_estimator == "gdpo" and self.custom_path is None:
            raise ValueError(
                "gdpo learns from the components of the scores and not from rewards, so use_kl_in_reward would do"
                " nothing: use actor.use_kl_loss"
            )
        return self
