"""The sections `actor` and `critic`: the models that are trained; and what every model that computes is told."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from splitppo.config.section import IS_WORK, MAY_CHANGE, KlEstimator, PositiveInt, Section, Share
from splitppo.config.subsections.policy_loss import SEQUENCE_LOSSES, PolicyLossConfig

LearningRate = Annotated[float, MAY_CHANGE, Field(ge=0.0, description="peak learning rate")]

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def is_dropout(name: str) -> bool:
    """Returns True for an attribute of a model's config that is a rate of dropout."""
    return name.endswith(("dropout", "_pdrop", "dropout_prob"))


class ComputedModelConfig(Section):
    """The keys that trained and frozen models have in common: model, precision, micro-batches."""

    model: Annotated[str, IS_WORK] = Field(min_length=1)
    """local folder or hub name"""

    override_config: dict[str, Any] = Field(default_factory=dict)
    """attributes of the model's config.json that are replaced; none that shapes weights, no dropout"""

    dtype: Annotated[Literal["fp32", "bf16"], IS_WORK] = "fp32"
    """compute; master weights and optimiser are fp32"""

    ppo_micro_batch_size_per_gpu: Annotated[PositiveInt | None, MAY_CHANGE] = None
    """rows per micro-batch; default: dynamic, by ppo_max_token_len_per_gpu"""

    ppo_max_token_len_per_gpu: Annotated[PositiveInt, MAY_CHANGE] = 16_384
    """token budget of a dynamic micro-batch"""

    use_remove_padding: Annotated[bool | None, MAY_CHANGE] = None
    """pack rows without padding; default: where the model can; else length-sorted, trimmed padding"""

    def _check_keys(self) -> None:
        if dropout := next((name for name, value in self.override_config.items() if value and is_dropout(name)), None):
            raise ValueError(f"override_config: all dropout is 0 here, got {dropout} {self.override_config[dropout]!r}")


class TrainedModelConfig(ComputedModelConfig):
    """The keys that actor and critic have in common: optimiser, batching."""

    lr: LearningRate
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """after warm-up; per step"""

    lr_warmup_steps: int = Field(0, ge=0)
    """linear warm-up, in steps"""

    lr_stable_steps: int = Field(0, ge=0)
    """steps at lr between warm-up and decay (WSD)"""

    lr_decay_steps: PositiveInt | None = None
    """steps, warm-up included, after which cosine or linear is at its minimum"""

    lr_min_ratio: Share = 0.0
    """floor of the decay, as a share of lr"""

    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW"""

    eps: float = Field(1e-8, gt=0.0)
    """AdamW"""

    weight_decay: float = Field(0.01, ge=0.0)
    """AdamW"""

    grad_clip: float = Field(1.0, gt=0.0)
    """maximal global gradient norm"""

    ppo_mini_batch_size: Annotated[PositiveInt | None, IS_WORK] = None
    """prompts per optimiser step; default: data.train_batch_size (critic: as actor)"""

    ppo_epochs: Annotated[PositiveInt, IS_WORK] = 1
    """passes over the experience per step"""

    shuffle: bool = False
    """mini-batches drawn in a new order in each epoch"""

    gradient_checkpointing: Annotated[bool, MAY_CHANGE] = False
    """recompute activations in the backward pass"""

    loss_agg_mode: LossAggMode = "token-mean"
    """The way in which the losses of tokens become one number; denominators are those of the mini-batch. For the actor,
    the default is seq-mean-token-mean if policy_loss.loss_mode is gspo, geo_mean or sapo."""

    loss_scale_factor: PositiveInt | None = None
    """what seq-mean-token-sum-norm divides by, beside sequences; default data.max_response_length"""

    def _check_keys(self) -> None:
        super()._check_keys()
        if self.lr_schedule != "constant" and self.lr_decay_steps is None:
            raise ValueError(f"lr_schedule {self.lr_schedule!r} needs lr_decay_steps")
        if self.lr_schedule == "constant" and self.lr_stable_steps:
            raise ValueError("lr_stable_steps is of no use with lr_schedule 'constant': expected linear or cosine")


class ActorConfig(TrainedModelConfig):
    """The policy and its loss."""

    lr: LearningRate = 1e-6
    clip_ratio: float = Field(0.2, gt=0.0, lt=1.0)
    """PPO clip range"""

    clip_ratio_low: float | None = Field(None, gt=0.0)
    """lower clip range; 1 or more: no lower bound of a ratio; default clip_ratio"""

    clip_ratio_high: float | None = Field(None, gt=0.0)
    """upper clip range; default clip_ratio"""

    clip_ratio_c: float | None = Field(3.0, gt=1.0)
    """dual clip for negative advantages; null: none"""

    entropy_coeff: float = 0.0
    """weight of the entropy bonus"""

    use_kl_loss: bool = False
    """add kl_loss_coef * KL(policy, reference) to the loss"""

    kl_loss_coef: float = Field(0.001, ge=0.0)
    """weight of the KL in the loss"""

    kl_loss_type: KlEstimator = "low_var_kl"
    """kl (k1) | abs | mse (k2) | low_var_kl (k3); with +: that value, k2's gradient"""

    target_kl: float | None = Field(None, gt=0.0)
    """an update ends before the mini-batch in which actor/ppo_kl is over it, in nats; null: never"""

    policy_loss: PolicyLossConfig = PolicyLossConfig()

    @model_validator(mode="before")
    @classmethod
    def _the_loss_is_aggregated_as_its_paper_does(cls, section: Any) -> Any:
        policy_loss = section.get("policy_loss") if isinstance(section, dict) else None
        if not isinstance(policy_loss, dict) or policy_loss.get("loss_mode") not in SEQUENCE_LOSSES:
            return section
        return {"loss_agg_mode": "seq-mean-token-mean", **section}

    @property
    def clip_low(self) -> float:
        """The distance below 1 at which the probability ratio is clipped."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """The distance above 1 at which the probability ratio is clipped."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class CriticConfig(TrainedModelConfig):
    """The value model and its loss."""

    model: Annotated[str, IS_WORK] = ""
    """local folder or hub name; default: actor.model"""

    lr: LearningRate = 1e-5
    cliprange_value: float = Field(0.5, gt=0.0)
    """range of the value clip around the old values"""

    normalize_values: bool = False
    """learn returns less their running mean, over their deviation; cliprange_value is on that scale"""

    warmup_steps: int = Field(0, ge=0)
    """how many first steps update the critic only (verl's critic_warmup counts one more)"""
