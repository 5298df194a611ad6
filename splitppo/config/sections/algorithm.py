"""The section `algorithm`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from splitppo.config.section import KlEstimator, OneOrMany, PositiveInt, Section, expected
from splitppo.config.subsections.estimator import EstimatorConfig
from splitppo.config.subsections.filter_groups import FilterGroupsConfig
from splitppo.config.subsections.phases import AdaptiveEntropy, Phase, check_apart
from splitppo.config.subsections.rejection import Rejection, WeightBounds, parse_rejections, parse_weight_bounds


def _is_switch_or_auto(value: object) -> bool:
    return value == "auto" or isinstance(value, bool)


SwitchOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(expected("auto, true or false", _is_switch_or_auto))]


class RolloutCorrectionConfig(Section):
    """Correction of tokens whose probabilities differ between rollout backend and trainer; names are verl's.

    r is the trainer's probability of a sampled token over the rollout backend's.
    """

    bypass_mode: SwitchOrAuto = "auto"
    """the log-probs that the rollout backend reports are the old ones, and the trainer computes none: what is weighed
    or rejected is so in the update, by the policy in training; auto: where both compute alike (rollout.backend hf,
    actor.dtype fp32) and nothing is corrected"""

    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """with bypass_mode: ppo_clip is the loss that actor.policy_loss names; reinforce is that loss, and rollout_is then
    weighs its tokens by the policy in training over the rollout backend"""

    rollout_is: Literal["token", "sequence"] | None = None
    """importance weights on the policy loss: r of each token, or its product over the response"""

    rollout_is_threshold: WeightBounds = 2.0
    """largest weight; larger ones are truncated to it. Two bounds, "0.5_4.0" in quotes: a weight outside of them is 0
    (IcePop)"""

    rollout_is_batch_normalize: bool = False
    """divide the weights by their mean over the batch"""

    rollout_rs: str | None = None
    """what is rejected, by k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r; a comma between several:
    token_k{1,2,3} rejects tokens, seq_{sum,mean}_k{1,2,3} and seq_max_k{2,3} whole responses"""

    rollout_rs_threshold: str | float | None = None
    """k1: bounds of 1 / r, the rollout backend's probability over the trainer's: "0.5_2.0" in quotes, or the upper
    one, whose reciprocal is the lower one; k2, k3: upper bound, nats"""

    def _check_keys(self) -> None:
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            raise ValueError("rollout_is_batch_normalize is set, but rollout_is is not")
        if self.loss_type == "reinforce" and (self.bypass_mode is False or self.rollout_is_batch_normalize):
            raise ValueError(
                "loss_type reinforce is the loss of bypass_mode, whose weights are not normalised: expected bypass_mode"
                " true or auto, and rollout_is_batch_normalize false"
            )
        if self.bypasses and self.loss_type == "ppo_clip" and self.rollout_is is not None:
            raise ValueError(
                "rollout_is multiplies nothing with bypass_mode and ppo_clip, whose ratio is over the rollout backend's"
                " probability already: set rollout_is to null, loss_type to reinforce, or bypass_mode to false"
            )
        _ = self.rejections

    @property
    def weight_bounds(self) -> tuple[float | None, float]:
        """The (lower, upper) bounds of importance weights; without a lower bound larger weights are truncated."""
        return parse_weight_bounds(self.rollout_is_threshold)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The criteria that a token must pass; without any, nothing is rejected."""
        return parse_rejections(self.rollout_rs, self.rollout_rs_threshold)

    @property
    def bypasses(self) -> bool:
        """True if the rollout backend's log-probs are the old ones; on loading, auto is resolved."""
        return self.bypass_mode is True

    @property
    def is_active(self) -> bool:
        """True if anything is weighted or rejected before the update; with bypass_mode the update itself does it."""
        return not self.bypasses and (self.rollout_is is not None or self.rollout_rs is not None)


class AlgorithmConfig(EstimatorConfig):
    """Advantages, the KL penalty in the reward, and the correction of rollouts."""

    use_kl_in_reward: bool = False
    """subtract kl_coef * KL from every token's reward"""

    kl_penalty: KlEstimator = "kl"
    """kl (k1) | abs | mse (k2) | low_var_kl (k3); with + the same: only values count"""

    kl_coef: float = Field(0.001, ge=0.0)
    """initial coefficient of the KL in the reward"""

    kl_ctrl: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: Ziegler et al., 2019"""

    kl_target: float = Field(0.1, gt=0.0)
    """adaptive: KL to hold, nats"""

    kl_horizon: PositiveInt = 10_000
    """adaptive: samples over which the coefficient moves"""

    mask_truncated_completions: bool = False
    """nothing is learned from responses that data.max_response_length has cut off (DAPO's overlong filtering); they
    still count in their group's baseline"""

    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    adaptive_entropy: AdaptiveEntropy = AdaptiveEntropy()
    phases: Annotated[tuple[Phase, ...], OneOrMany] = ()
    """[{from_step, to_step, ...}, ...]: steps in which losses and coefficients are others"""

    def _check_keys(self) -> None:
        super()._check_keys()
        check_apart(self.phases)
        if self.use_kl_in_reward and self.adv_estimator == "gdpo" and self.custom_path is None:
            raise ValueError(
                "gdpo learns from the components of the scores and not from rewards, so use_kl_in_reward would do"
                " nothing: use actor.use_kl_loss"
            )

    def phase_number(self, step: int) -> int:
        """Returns the number of the phase that a step belongs to, from 1; 0 if it belongs to none."""
        return next((number for number, phase in enumerate(self.phases, start=1) if phase.holds_at(step)), 0)
