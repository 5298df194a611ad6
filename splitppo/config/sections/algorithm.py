"""The configuration section `algorithm`: advantages, KL in the reward, rollout correction, dynamic sampling, phases."""

from typing import Annotated, Literal

from pydantic import Field

from splitppo.config.section import KlEstimator, OneOrMany, PositiveInt, Section, SwitchOrAuto
from splitppo.config.subsections.estimator import EstimatorConfig
from splitppo.config.subsections.filter_groups import FilterGroupsConfig
from splitppo.config.subsections.phases import AdaptiveEntropy, Phase, check_apart
from splitppo.config.subsections.rejection import Rejection, WeightBounds, parse_rejections, parse_weight_bounds


class RolloutCorrectionConfig(Section):
    """Correction of tokens whose probabilities differ between rollout backend and trainer.

    r is the trainer's probability of a sampled token divided by the rollout backend's. The names of the keys are
    verl's.
    """

    bypass_mode: SwitchOrAuto = "auto"
    """If true, the log-probs that the rollout backend reports are the old log-probs, and the trainer computes none
    before its update. Weights and rejection then happen inside the update, by the policy in training. auto: true if
    both sides compute alike (rollout.backend hf, actor.dtype fp32) and nothing is corrected, or if loss_type is
    reinforce; else false."""

    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """The loss of the policy if bypass_mode is on. ppo_clip: the loss that actor.policy_loss names. reinforce:
    REINFORCE, whose tokens rollout_is weighs by the probability under the policy in training over the rollout
    backend's."""

    rollout_is: Literal["token", "sequence"] | None = None
    """The importance weights that multiply the policy loss. token: r of each token. sequence: the product of r over the
    response. null: no weights."""

    rollout_is_threshold: WeightBounds = 2.0
    """The largest importance weight; larger weights are truncated to it. Two bounds, "0.5_4.0" in quotes: a weight
    outside of them is 0 (IcePop)."""

    rollout_is_batch_normalize: bool = False
    """If true, the importance weights are divided by their mean over the batch."""

    rollout_rs: str | None = None
    """The criteria by which tokens or responses are rejected, with commas between them. They compare k1 = -log r, k2 =
    (log r)^2 / 2 or k3 = r - 1 - log r. token_k{1,2,3} rejects tokens; seq_{sum,mean,max}_k{1,2,3} reject
    whole responses. null: nothing is rejected."""

    rollout_rs_threshold: str | float | None = None
    """The bounds of rollout_rs: one for all criteria, or one for each, with commas between them. For k1: bounds of 1 /
    r, "0.5_2.0" in quotes, or the upper bound alone, whose reciprocal is then the lower bound; for seq_max_k1 the upper
    bound alone, and none below. For k2 and k3: the upper bound, in nats."""

    def _check_keys(self) -> None:
        """Raises ValueError if the keys of the rollout correction contradict each other."""
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
        """The (lower, upper) bounds of importance weights; lower is None if larger weights are truncated to upper."""
        return parse_weight_bounds(self.rollout_is_threshold)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The criteria of `rollout_rs` that a token or response must pass; empty if nothing is rejected."""
        return parse_rejections(self.rollout_rs, self.rollout_rs_threshold)

    @property
    def bypasses(self) -> bool:
        """True if the rollout backend's log-probs are used as old log-probs; False for an unresolved `auto`."""
        return self.bypass_mode is True

    @property
    def is_active(self) -> bool:
        """True if tokens are weighted or rejected before the update; with bypass_mode the update does that itself."""
        return not self.bypasses and (self.rollout_is is not None or self.rollout_rs is not None)


class AlgorithmConfig(EstimatorConfig):
    """The settings of advantages, the KL penalty in the reward, rollout correction, dynamic sampling and phases."""

    use_kl_in_reward: bool = False
    """If true, kl_coef * KL(policy, reference) is subtracted from the reward of every token."""

    kl_penalty: KlEstimator = "kl"
    """The estimator of the KL in the reward. kl or k1: the log-ratio; abs: its absolute value; mse or k2: half its
    square; low_var_kl or k3: the estimator of low variance that is never negative. A + at the end changes nothing here,
    where only values count."""

    kl_coef: float = Field(0.001, ge=0.0)
    """The coefficient of the KL in the reward, if use_kl_in_reward is true; with kl_ctrl adaptive its first value."""

    kl_ctrl: Literal["fixed", "adaptive"] = "fixed"
    """The control of kl_coef. fixed: it stays. adaptive: it moves so that the KL stays near kl_target (Ziegler et al.,
    2019)."""

    kl_target: float = Field(0.1, gt=0.0)
    """The KL to the reference, in nats, near which kl_ctrl adaptive keeps the policy."""

    kl_horizon: PositiveInt = 10_000
    """The number of samples over which kl_ctrl adaptive moves the coefficient: a larger number moves it more slowly."""

    mask_truncated_completions: bool = False
    """If true, neither model learns from responses that data.max_response_length has cut off (DAPO's overlong
    filtering). These responses still count in the baseline of their group."""

    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    adaptive_entropy: AdaptiveEntropy = AdaptiveEntropy()
    phases: Annotated[tuple[Phase, ...], OneOrMany] = ()
    """Spans of steps in which losses and coefficients have other values: [{from_step, to_step, ...}, ...]."""

    def _check_keys(self) -> None:
        super()._check_keys()
        check_apart(self.phases)
        if self.use_kl_in_reward and self.adv_estimator == "gdpo" and self.custom_path is None:
            raise ValueError(
                "gdpo learns from the components of the scores and not from rewards, so use_kl_in_reward would do"
                " nothing: use actor.use_kl_loss"
            )

    def phase_number(self, step: int) -> int:
        """Returns the number (from 1) of the entry of `phases` that a step belongs to; 0 if it belongs to none."""
        return next((number for number, phase in enumerate(self.phases, start=1) if phase.holds_at(step)), 0)
