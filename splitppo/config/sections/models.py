"""The configuration sections `actor` and `critic`, and the base class with the keys that all models have in common."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from splitppo.config.section import IS_WORK, MAY_CHANGE, KlEstimator, OneOrMany, PositiveInt, Section, Share, expected
from splitppo.config.subsections.policy_loss import SEQUENCE_LOSSES, PolicyLossConfig
from splitppo.config_error import config_errors
from splitppo.text_fields import field_names

LearningRate = Annotated[float, MAY_CHANGE, Field(ge=0.0, description="The highest learning rate.")]

MOST_EPOCHS = 1000  # that an update may ask for

Checkpointing = Literal[False, True, "selective"]
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def is_dropout(name: str) -> bool:
    """Returns True if this name in a model's config.json is that of a dropout rate, or of a router's noise."""
    return name.endswith(("dropout", "_pdrop", "dropout_prob", "jitter_noise", "jitter_eps"))


class ComputedModelConfig(Section):
    """The settings that trained and frozen models have in common: model, precision, micro-batches."""

    model: Annotated[str, IS_WORK] = Field(min_length=1)
    """The model: a local folder, or a name on the Hugging Face hub."""

    override_config: dict[str, Any] = Field(default_factory=dict)
    """Attributes of the model's config.json that get another value. Attributes that set the shape of weights, and rates
    of dropout above 0, are refused."""

    dtype: Annotated[Literal["fp32", "bf16"], IS_WORK] = "fp32"
    """The type of numbers in which the model computes. The weights that the optimizer updates are fp32 in any case."""

    ppo_micro_batch_size_per_gpu: Annotated[PositiveInt | None, MAY_CHANGE] = None
    """The number of rows that a rank computes at the same time. null: as many rows as ppo_max_token_len_per_gpu
    allows. A response with several contexts is a row for each of them."""

    ppo_max_token_len_per_gpu: Annotated[PositiveInt, MAY_CHANGE] = 16_384
    """The largest number of tokens that a rank computes at the same time, if ppo_micro_batch_size_per_gpu is null."""

    use_remove_padding: Annotated[bool | None, MAY_CHANGE] = None
    """If true, rows are packed one after another, without padding. If false, rows of similar length are padded
    together. null: packed if the model supports it."""

    param_offload: Annotated[bool, MAY_CHANGE] = False
    """If true, the weights lie in main memory while the model does not compute, and come back for its next command."""

    compile: Annotated[bool, MAY_CHANGE] = False
    """If true, torch.compile makes code for the decoder layers (all but attention) and for log-probs from logits, at
    the start of the group. That needs a C++ compiler, and takes a minute once; computing then takes less time."""

    @property
    def has_fp32_head(self) -> bool:
        """True if logits are computed in fp32 by a model that computes in bf16."""
        return self.dtype == "bf16"

    def _check_keys(self) -> None:
        if dropout := next((name for name, value in self.override_config.items() if value and is_dropout(name)), None):
            raise ValueError(f"override_config: all dropout is 0 here, got {dropout} {self.override_config[dropout]!r}")


class TrainedModelConfig(ComputedModelConfig):
    """The settings that actor and critic have in common: adapters, ranks, optimizer and batches."""

    lora_rank: Annotated[int, IS_WORK, Field(ge=0, le=8192)] = 0
    """The rank of LoRA adapters, the only weights that are then trained (and the critic's value head). 0: no adapters,
    all weights are trained."""

    lora_alpha: float = Field(16.0, gt=0.0)
    """The scale of the adapters: their product counts lora_alpha / lora_rank times."""

    target_modules: Annotated[str | tuple[str, ...], IS_WORK] = "all-linear"
    """The linear layers that get an adapter: all-linear (all but the head), a list of the last parts of their names, or
    a regular expression that matches whole names. Those of a frozen vision tower get none."""

    exclude_modules: Annotated[str | tuple[str, ...] | None, IS_WORK] = None
    """The linear layers of target_modules that get no adapter, as a list of names or a regular expression."""

    lora_adapter_path: str | None = None
    """The folder of an adapter in peft's format that training begins with. null: a new adapter, which changes
    nothing at first."""

    freeze: Annotated[tuple[str, ...], OneOrMany, IS_WORK] = ()
    """Weights that do not learn, as regular expressions, each found anywhere in a weight's name in the safetensors
    files of the model: `\\.self_attn\\.` all attention, `embed_tokens` the embedding (with an output layer that is
    tied to it), `layers\\.[0-3]\\.` the first four layers. A new value head always learns. With lora_rank the names are
    those of the adapters, such as model.layers.0.mlp.up_proj.lora_A.weight, and of a value head that the folder has."""

    freeze_vision_tower: Annotated[bool, IS_WORK] = True
    """If true, the part of a model that reads images, with the layers that map its features to tokens, does not learn.
    A model that reads text alone has no such part."""

    strategy: Annotated[Literal["fsdp2", "ddp"], MAY_CHANGE] = "fsdp2"
    """The way in which the ranks of the group hold its models. fsdp2: in shards; ddp: every rank holds all weights,
    which is faster for small models and for adapters, if they fit."""

    fsdp_size: Annotated[int, MAY_CHANGE, Field(ge=-1)] = -1
    """The number of neighbouring ranks over which strategy fsdp2 divides the weights; such groups of ranks hold copies
    of each other (HSDP). It must divide the number of ranks. -1: all ranks."""

    ulysses_sequence_parallel_size: Annotated[int, MAY_CHANGE, Field(ge=1)] = 1
    """The number of neighbouring ranks that divide the positions of their rows among them, for long responses. Together
    they compute this many times ppo_max_token_len_per_gpu tokens at the same time. It must divide fsdp_size, or the
    number of ranks, and the attention heads of the models of the group."""

    optimizer_offload: Annotated[bool, MAY_CHANGE] = False
    """If true, the state of the optimizer lies in main memory, and comes to the GPU in buckets in each of its steps: at
    most two, of 256 MiB each, are there. The group needs GPUs."""

    optimizer_state_dtype: Literal["fp32", "bf16"] = "fp32"
    """The type of numbers in which the state of the optimizer is kept. bf16 takes half the memory; the state is rounded
    up or down at random, so that it is right in the mean, and exactly the same in a resumed run."""

    lr: LearningRate
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """The course of the learning rate after the warm-up, step by step: it stays, or falls along a cosine or a line."""

    lr_warmup_steps: int = Field(0, ge=0)
    """The number of steps at the beginning of the run over which the learning rate rises to lr, in equal amounts. In
    all keys of the learning rate a step is one that trains the model: for the actor, those of the critic's warm-up
    (critic.warmup_steps) do not count."""

    lr_warmup_steps_ratio: Share = 0.0
    """The number of steps of the warm-up as a share of the run's steps, rounded down. Only without lr_warmup_steps. The
    run's steps are those of run.total_steps and run.total_epochs, also after a resume that changes them."""

    lr_stable_steps: int = Field(0, ge=0)
    """The number of steps at lr between warm-up and decay (WSD). Only with lr_schedule cosine or linear."""

    lr_decay_steps: PositiveInt | None = None
    """The step, counted from the beginning of the run with its warm-up, at which the decay of lr_schedule cosine or
    linear has reached its lowest value. null: the number of steps of the run, as in lr_warmup_steps_ratio; the actor
    makes fewer than these if the critic warms up, and ends as many steps before its lowest rate."""

    lr_min_ratio: Share = 0.0
    """The lowest learning rate of the decay, as a share of lr."""

    betas: tuple[Share, Share] = (0.9, 0.999)
    """The two decay rates of AdamW: of the mean of the gradients, and of the mean of their squares."""

    eps: float = Field(1e-8, gt=0.0)
    """The number that AdamW adds to the denominator."""

    weight_decay: float = Field(0.01, ge=0.0)
    """The weight decay of AdamW."""

    grad_clip: float = Field(1.0, gt=0.0)
    """The largest norm of the gradient over all weights; a larger gradient is scaled down to it."""

    ppo_mini_batch_size: Annotated[PositiveInt | None, IS_WORK] = None
    """The number of prompts in each optimizer step. null: data.train_batch_size for the actor,
    actor.ppo_mini_batch_size for the critic."""

    ppo_epochs: Annotated[PositiveInt, IS_WORK] = 1
    """The number of passes over the responses of a step."""

    shuffle: bool = False
    """If true, each of ppo_epochs divides the responses into mini-batches in a new order."""

    gradient_checkpointing: Annotated[Checkpointing, MAY_CHANGE] = False
    """If true, activations are computed again in the backward pass, which takes less memory and more time. selective:
    all but the outputs of attention, which take the most time at long rows."""

    loss_agg_mode: LossAggMode = "token-mean"
    """The way in which the losses of tokens become one number; its denominators are those of the whole mini-batch. For
    the actor, the default is seq-mean-token-mean if policy_loss.loss_mode is gspo, geo_mean or sapo."""

    loss_scale_factor: PositiveInt | None = None
    """The number of tokens that loss_agg_mode seq-mean-token-sum-norm divides by, in addition to the number of
    sequences. null: data.max_response_length."""

    @property
    def needs_total_steps(self) -> bool:
        """True if the learning rate of a step depends on the number of steps of the run."""
        decays_over_run = self.lr_schedule != "constant" and self.lr_decay_steps is None
        return decays_over_run or self.lr_warmup_steps_ratio > 0.0

    def _check_keys(self) -> None:
        """Raises ValueError if keys of the learning rate or of the adapters contradict each other or say nothing."""
        super()._check_keys()
        if self.lr_warmup_steps and self.lr_warmup_steps_ratio:
            raise ValueError("lr_warmup_steps and lr_warmup_steps_ratio: expected one of them, the other must be 0")
        if self.lr_schedule == "constant" and self.lr_stable_steps:
            raise ValueError("lr_stable_steps is of no use with lr_schedule 'constant': expected linear or cosine")
        if self.lora_adapter_path is not None and not self.lora_rank:
            raise ValueError("lora_adapter_path: is of no use with lora_rank 0: set lora_rank to that of the adapter")
        for option in ("target_modules", "exclude_modules"):
            if isinstance(wanted := getattr(self, option), str):
                with config_errors(re.error, before=f"{option}: expected names or a regular expression (", after=")"):
                    re.compile(wanted)
        for pattern in self.freeze:
            with config_errors(re.error, before=f"freeze: expected regular expressions, got {pattern!r} (", after=")"):
                re.compile(pattern)
        if not self.target_modules:
            raise ValueError("target_modules: expected all-linear, names of layers, or a regular expression")
        if "lm_head" in self.target_modules and isinstance(self.target_modules, tuple):
            raise ValueError("target_modules: lm_head cannot have an adapter (its logits are made in chunks)")


class ActorConfig(TrainedModelConfig):
    """The settings of the actor: the policy model, its optimizer and its loss."""

    fp32_lm_head: bool = True
    """If true and dtype is bf16, the output layer of policy and reference computes logits in fp32, wherever they sample
    or train. bf16 logits shift log-probs by 0.003 to 0.012 nats."""

    lr: LearningRate = 1e-6
    clip_ratio: float = Field(0.2, gt=0.0, lt=1.0)
    """The distance from 1 at which the probability ratio is clipped, on both sides."""

    clip_ratio_low: float | None = Field(None, gt=0.0)
    """The distance below 1 at which the probability ratio is clipped. 1 or more: the ratio has no lower bound. null:
    clip_ratio."""

    clip_ratio_high: float | None = Field(None, gt=0.0)
    """The distance above 1 at which the probability ratio is clipped. null: clip_ratio."""

    clip_ratio_c: float | None = Field(3.0, gt=1.0)
    """The bound of dual clip: for a negative advantage the loss of a token is at most this number times the absolute
    advantage. null: no dual clip."""

    entropy_coeff: float = 0.0
    """The weight of the entropy bonus in the loss. 0: no bonus."""

    use_kl_loss: bool = False
    """If true, kl_loss_coef * KL(policy, reference) is added to the loss."""

    kl_loss_coef: float = Field(0.001, ge=0.0)
    """The weight of the KL in the loss, if use_kl_loss is true."""

    kl_loss_type: KlEstimator = "low_var_kl"
    """The estimator of the KL in the loss. kl or k1: the log-ratio; abs: its absolute value; mse or k2: half its
    square; low_var_kl or k3: the estimator of low variance that is never negative. With a + at the end, the value is
    that of the estimator, and the gradient is that of k2."""

    target_kl: float | None = Field(None, gt=0.0)
    """The largest actor/ppo_kl, in nats, that a mini-batch may show before its optimizer step. Over it, the update of
    the step ends there. null: no bound."""

    policy_loss: PolicyLossConfig = PolicyLossConfig()

    @property
    def has_fp32_head(self) -> bool:
        """True if logits are computed in fp32 by a model that computes in bf16."""
        return self.fp32_lm_head and super().has_fp32_head

    @model_validator(mode="before")
    @classmethod
    def _the_loss_is_aggregated_as_its_paper_does(cls, section: Any) -> Any:
        policy_loss = section.get("policy_loss") if isinstance(section, dict) else None
        if not isinstance(policy_loss, dict) or policy_loss.get("loss_mode") not in SEQUENCE_LOSSES:
            return section
        return {"loss_agg_mode": "seq-mean-token-mean", **section}

    @property
    def clip_low(self) -> float:
        """The distance below 1 at which the policy loss clips the probability ratio."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """The distance above 1 at which the policy loss clips the probability ratio."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class WarmUpUntilConfig(Section):
    """The end of the critic's warm-up: after `patience` steps in a row without a rise of critic/mc_explained_var."""

    min_delta: float = Field(0.01, ge=0.0)
    """The explained variance has risen only if it exceeds the highest one so far by more than this."""

    patience: PositiveInt = 3
    """The number of steps in a row without a rise after which the warm-up ends."""


class CriticConfig(TrainedModelConfig):
    """The settings of the critic: the value model, its optimizer and its loss."""

    model: Annotated[str, IS_WORK] = ""
    """The model that the critic starts from: a local folder, or a name on the Hugging Face hub. Empty: actor.model. Any
    model with an embedding for each token id of the policy's tokenizer can be the critic, also a smaller one."""

    lr: LearningRate = 1e-5
    privileged_prompt: Annotated[
        str | None,
        IS_WORK,
        expected("a text, or null; in quotes of YAML if it begins with a brace or has a colon before a space"),
    ] = None
    """A text that the value model alone reads, before the prompt: with fields in braces, such as {ground_truth}, any
    field of the row's extra_info, and what the environment's class names in privileged(). null: no such text."""

    max_privileged_length: Annotated[PositiveInt, MAY_CHANGE, IS_WORK] = 256
    """The most tokens that the text of privileged_prompt may have. A longer one is an error."""

    cliprange_value: float = Field(0.5, gt=0.0)
    """The distance from the old values to which the new values are clipped in the value loss."""

    normalize_values: bool = False
    """If true, the critic learns returns less their running mean, divided by their running standard deviation.
    cliprange_value is then on that scale."""

    warmup_steps: int = Field(0, ge=0)
    """The number of steps at the beginning of the run that update the critic only, at most with warmup_until. (verl's
    critic_warmup counts one step more.)"""

    warmup_epochs: Annotated[int, IS_WORK, Field(ge=1, le=MOST_EPOCHS)] | None = None
    """The number of passes over the responses of a step during the warm-up. null: ppo_epochs."""

    warmup_until: WarmUpUntilConfig | None = None
    """The warm-up may end before warmup_steps: once the critic explains no more of the returns than before. null: it
    takes warmup_steps."""

    def _check_keys(self) -> None:
        """Raises ValueError if keys of the warm-up say nothing, or `privileged_prompt` cannot be filled in."""
        super()._check_keys()
        for name in ("warmup_epochs", "warmup_until"):
            if getattr(self, name) is not None and not self.warmup_steps:
                raise ValueError(f"{name}: is of no use with warmup_steps 0: set warmup_steps to the most steps of it")
        if self.privileged_prompt is None:
            return
        try:
            names = field_names(self.privileged_prompt)
        except ValueError as error:
            raise ValueError(f"privileged_prompt: {error}") from error
        if not names:
            raise ValueError("privileged_prompt: expected a text with fields in braces, such as {ground_truth}")
