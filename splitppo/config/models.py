"""The sections `actor` and `critic`: the models that are trained; and what every model that computes is told."""

from typing import Any, Literal

from pydantic import Field, model_validator

from splitppo.config.policy_loss import COVARIANCE_LOSSES, MAX_COVARIANCE_EPOCHS, SEQUENCE_LOSSES, PolicyLossConfig
from splitppo.config.section import PositiveInt, Section, Share

KlLossType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class ComputedModelConfig(Section):
    """What trained and frozen models have in common: model, precision, micro-batches."""

    model: str = Field(description="local folder or hub name", min_length=1)
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="compute; master weights and optimiser are fp32")
    ppo_micro_batch_size_per_gpu: PositiveInt | None = Field(
        None, description="rows per micro-batch; default: dynamic, by ppo_max_token_len_per_gpu"
    )
    ppo_max_token_len_per_gpu: PositiveInt = Field(16_384, description="token budget of a dynamic micro-batch")
    use_remove_padding: bool | None = Field(
        None, description="pack rows without padding; default: where the model can; else length-sorted, trimmed padding"
    )


class TrainedModelConfig(ComputedModelConfig):
    """What actor and critic have in common: optimiser, batching."""

    lr: float = Field(ge=0.0, description="peak learning rate")
    lr_schedule: Literal["constant", "cosine", "linear"] = Field("constant", description="after warm-up; per step")
    lr_warmup_steps: int = Field(0, ge=0, description="linear warm-up, in steps")
    lr_decay_steps: PositiveInt | None = Field(
        None, description="steps, warm-up included, after which cosine or linear is at its minimum"
    )
    lr_min_ratio: Share = Field(0.0, description="floor of the decay, as a share of lr")
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="AdamW")
    eps: float = Field(1e-8, gt=0.0, description="AdamW")
    weight_decay: float = Field(0.01, ge=0.0, description="AdamW")
    grad_clip: float = Field(1.0, gt=0.0, description="maximal global gradient norm")
    ppo_mini_batch_size: PositiveInt | None = Field(
        None, description="prompts per optimiser step; default: data.train_batch_size (critic: as actor)"
    )
    ppo_epochs: PositiveInt = Field(1, description="passes over the experience per step")
    shuffle: bool = Field(False, description="mini-batches drawn in a new order in each epoch")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    loss_agg_mode: LossAggMode = Field(
        "token-mean", description="how token losses become one number; denominators are the mini-batch's"
    )
    loss_scale_factor: PositiveInt | None = Field(
        None, description="what seq-mean-token-sum-norm divides by, beside sequences; default data.max_response_length"
    )

    @model_validator(mode="after")
    def _decay_needs_an_end(self) -> "TrainedModelConfig":
        if self.lr_schedule != "constant" and self.lr_decay_steps is None:
            raise ValueError(f"lr_schedule {self.lr_schedule!r} needs lr_decay_steps")
        return self


class ActorConfig(TrainedModelConfig):
    """The policy and its loss."""

    lr: float = Field(1e-6, ge=0.0, description="peak learning rate")
    loss_agg_mode: LossAggMode = Field(
        "token-mean",
        description="how token losses become one number; denominators are the mini-batch's. The default of"
        f" {', '.join(SEQUENCE_LOSSES)} is seq-mean-token-mean",
    )
    clip_ratio: float = Field(0.2, gt=0.0, lt=1.0, description="PPO clip range")
    clip_ratio_low: float | None = Field(None, gt=0.0, lt=1.0, description="lower clip range; default clip_ratio")
    clip_ratio_high: float | None = Field(None, gt=0.0, description="upper clip range; default clip_ratio")
    clip_ratio_c: float | None = Field(3.0, gt=1.0, description="dual clip for negative advantages; null: none")
    entropy_coeff: float = Field(0.0, description="weight of the entropy bonus")
    use_kl_loss: bool = Field(False, description="add kl_loss_coef * KL(policy, reference) to the loss")
    kl_loss_coef: float = Field(0.001, ge=0.0, description="weight of the KL in the loss")
    kl_loss_type: KlLossType = Field(
        "low_var_kl", description="kl (k1) | abs | mse (k2) | low_var_kl (k3); with +: that value, k2's gradient"
    )
    target_kl: float | None = Field(
        None,
        gt=0.0,
        description="an update ends before the mini-batch in which actor/ppo_kl is over it, in nats; null: never",
    )
    policy_loss: PolicyLossConfig = PolicyLossConfig()

    @model_validator(mode="before")
    @classmethod
    def _the_loss_is_aggregated_as_its_paper_does(cls, section: Any) -> Any:
        policy_loss = section.get("policy_loss") if isinstance(section, dict) else None
        if not isinstance(policy_loss, dict) or policy_loss.get("loss_mode") not in SEQUENCE_LOSSES:
            return section
        return {"loss_agg_mode": "seq-mean-token-mean", **section}

    @model_validator(mode="after")
    def _a_token_has_a_bit_for_every_epoch(self) -> "ActorConfig":
        loss_mode = self.policy_loss.loss_mode
        if loss_mode in COVARIANCE_LOSSES and self.ppo_epochs > MAX_COVARIANCE_EPOCHS:
            raise ValueError(
                f"loss_mode: {loss_mode} allows {MAX_COVARIANCE_EPOCHS} ppo_epochs at most, got {self.ppo_epochs}"
            )
        return self

    @property
    def clip_low(self) -> float:
        """How far below 1 the probability ratio is clipped."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """How far above 1 it is."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class CriticConfig(TrainedModelConfig):
    """The value model and its loss."""

    model: str = Field("", description="local folder or hub name; default: actor.model")
    lr: float = Field(1e-5, ge=0.0, description="peak learning rate")
    cliprange_value: float = Field(0.5, gt=0.0, description="range of the value clip around the old values")
    normalize_values: bool = Field(
        False,
        description="learn returns less their running mean, over their deviation; cliprange_value is on that scale",
    )
    warmup_steps: int = Field(
        0, ge=0, description="how many first steps update the critic only (verl's critic_warmup counts one more)"
    )
