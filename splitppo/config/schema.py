"""The configuration tree: one YAML per run, read by every process.

Every model is frozen and refuses unknown keys. Field names are verl's where verl has a name for the thing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from splitppo.config.debug import DebugConfig
from splitppo.config.rejection import Rejection, parse_rejections
from splitppo.config.section import Section
from splitppo.config.security import SecurityConfig, is_loopback


def _one_or_many(value: Any) -> Any:
    """Lets a single entry stand for a list of one."""
    return value if isinstance(value, list | tuple) else [value]


def _number_or_auto(value: Any) -> Any:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError("expected auto, or a number of at least 1")
    return value


Paths = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]
Indices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_one_or_many)]
# Under it logits divided by the temperature, or their exponentials, may leave float32 (vLLM raises it to this).
MIN_TEMPERATURE = 0.01


def _greedy_or_sampled(value: float) -> float:
    if 0.0 < value < MIN_TEMPERATURE:
        raise ValueError(f"expected 0 (greedy) or at least {MIN_TEMPERATURE:g}, got {value:g}")
    return value


Temperature = Annotated[float, Field(ge=0.0), AfterValidator(_greedy_or_sampled)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
NumberOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto)]
Schedule = Literal["serial", "gather", "overlap"]
LossMode = Literal["vanilla"]
KlLossType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]


class RunConfig(Section):
    """The run as a whole."""

    dir: Path = Field(description="run folder; storage that the controller and all ranks share")
    name: str = Field("splitppo", description="name in trackers and logs", min_length=1)
    seed: int = Field(1, ge=0, lt=2**31, description="seeds prompt order, sampling and new model heads")
    total_steps: int = Field(ge=1, description="PPO steps of the whole run")
    stop_after_step: PositiveInt | None = Field(None, description="stop early after this step; changes no schedule")
    schedule: Schedule = Field("gather", description="serial | gather | overlap: what may run at the same time")
    resume: str = Field("auto", description="auto | disable | path of a global_step_N folder", min_length=1)


class DataConfig(Section):
    """Prompts: which files, how many per step, how long."""

    train_files: Paths = Field(description="parquet or JSONL files with the training prompts", min_length=1)
    val_files: Paths = Field((), description="parquet or JSONL files with the validation prompts")
    train_batch_size: PositiveInt = Field(description="prompts per step")
    max_prompt_length: PositiveInt = Field(512, description="tokens; longer prompts are filtered or truncated")
    max_response_length: PositiveInt = Field(512, description="tokens sampled at most per response")
    prompt_key: str = Field("prompt", description="column that holds the chat messages or the plain prompt")
    max_samples: PositiveInt | None = Field(None, description="use only the first N training rows")
    val_max_samples: PositiveInt | None = Field(None, description="use only the first N validation rows")
    shuffle: bool = Field(True, description="a new prompt order in each epoch, a function of seed and epoch")
    filter_overlong_prompts: bool = Field(True, description="drop prompts longer than max_prompt_length")
    truncation: Literal["error", "left", "right", "middle"] = Field(
        "error", description="what happens to an overlong prompt that is not filtered; the side that is cut"
    )
    tokenizer: str | None = Field(None, description="folder or hub name; default: actor.model")
    chat_template: Path | None = Field(None, description="Jinja file that replaces the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to the template")


class VllmConfig(Section):
    """The vLLM engine inside the actor's processes (rollout.backend: vllm); names are vLLM's and verl's."""

    tensor_model_parallel_size: PositiveInt = Field(
        1, description="ranks that share one engine; divides services.actor.num_processes, the rest are replicas"
    )
    max_model_len: PositiveInt | None = Field(
        None, description="tokens of prompt and response; default: data.max_prompt_length + data.max_response_length"
    )
    max_num_seqs: PositiveInt = Field(256, description="responses that one engine decodes together")
    max_num_batched_tokens: PositiveInt = Field(8192, description="tokens that one engine step computes at most")
    enable_chunked_prefill: bool = Field(True, description="prompts may be prefilled in pieces, beside decoding")
    enable_prefix_caching: bool = Field(True, description="prompts that begin alike share their KV cache")
    kv_cache_gb: float | None = Field(
        None, gt=0.0, description="KV cache per rank, GiB; default: 1 on a CPU, by gpu_memory_utilization on a GPU"
    )
    gpu_memory_utilization: float = Field(
        0.5, gt=0.0, lt=1.0, description="share of a GPU's memory for vLLM's weights and KV cache while it generates"
    )
    enforce_eager: bool = Field(False, description="no CUDA graphs (there are none on a CPU)")
    sleep_level: Literal[0, 1, 2] = Field(
        1,
        description="GPU memory given back while it does not generate: 0 none, 1 weights (to the host) and KV cache,"
        " 2 all",
    )


class RolloutConfig(Section):
    """Sampling of responses, and the engine that does it."""

    backend: Literal["hf", "vllm"] = Field("hf", description="rollout engine: the policy itself, or vLLM beside it")
    n: PositiveInt = Field(1, description="responses per prompt")
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, description="divides the logits, in sampling and in log-probs")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus; 1 keeps every token")
    top_k: int = Field(0, ge=0, description="most likely tokens kept; 0 keeps every token")
    stop: tuple[str, ...] = Field((), description="texts that end a response, beside the end-of-sequence tokens")
    max_batch_size: PositiveInt = Field(256, description="rows that one rank decodes together (hf)")
    stream_groups: PositiveInt = Field(
        1, description="contiguous groups of prompts whose responses are sent on as soon as the group has ended"
    )
    check_freq: int | None = Field(
        None,
        ge=0,
        description="steps between comparisons of the rollout engine's log-probs with the trainer's, from the first"
        " step on; 0: never; default: 1 for an engine with weights of its own (vllm), else 0",
    )
    max_log_prob_diff: float | None = Field(
        None,
        gt=0.0,
        description="largest difference that such a comparison may find, nats; default: 1e-3 (actor.dtype fp32), 2",
    )
    vllm: VllmConfig = Field(default_factory=lambda: VllmConfig.model_validate({}))


class RolloutCorrectionConfig(Section):
    """What is done about tokens on which the rollout engine's and the trainer's probabilities differ; names are verl's.

    r is the trainer's probability of a sampled token over the rollout engine's.
    """

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
        description="k1: bounds of 1 / r, the rollout engine's probability over the trainer's: \"0.5_2.0\" in quotes,"
        " or the upper one, whose reciprocal is the lower one; k2, k3: upper bound, nats",
    )

    @model_validator(mode="after")
    def _thresholds_fit(self) -> RolloutCorrectionConfig:
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            raise ValueError("rollout_is_batch_normalize is set, but rollout_is is not")
        parse_rejections(self.rollout_rs, self.rollout_rs_threshold)
        return self

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The criteria that a token must pass; none: nothing is rejected."""
        return parse_rejections(self.rollout_rs, self.rollout_rs_threshold)

    @property
    def is_active(self) -> bool:
        """Whether anything is weighted or rejected; what differs is measured in any case."""
        return self.rollout_is is not None or self.rollout_rs is not None


class AlgorithmConfig(Section):
    """Advantages, the KL penalty in the reward, and the correction of rollouts."""

    adv_estimator: str = Field("gae", description="gae | grpo (see controller/advantages.py for all)")
    gamma: Fraction = Field(1.0, description="discount")
    lam: Fraction = Field(1.0, description="GAE lambda")
    norm_adv_by_std_in_grpo: bool = Field(True, description="off: Dr. GRPO")
    use_kl_in_reward: bool = Field(False, description="subtract kl_coef * KL from every token's reward")
    kl_penalty: str = Field("kl", description="kl (k1) | abs | mse (k2) | low_var_kl (k3)")
    kl_coef: float = Field(0.001, ge=0.0, description="initial coefficient of the KL in the reward")
    kl_ctrl: Literal["fixed", "adaptive"] = Field("fixed", description="adaptive: Ziegler et al., 2019")
    kl_target: float = Field(0.1, gt=0.0, description="adaptive: KL to hold, nats")
    kl_horizon: PositiveInt = Field(10_000, description="adaptive: samples over which the coefficient moves")
    rollout_correction: RolloutCorrectionConfig = Field(
        default_factory=lambda: RolloutCorrectionConfig.model_validate({})
    )


class TrainedModelConfig(Section):
    """What actor and critic have in common: model, optimiser, batching, placement of compute."""

    model: str = Field(description="local folder or hub name", min_length=1)
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="compute; master weights and optimiser are fp32")
    lr: float = Field(ge=0.0, description="peak learning rate")
    lr_schedule: Literal["constant", "cosine", "linear"] = Field("constant", description="after warm-up; per step")
    lr_warmup_steps: int = Field(0, ge=0, description="linear warm-up, in steps")
    lr_decay_steps: PositiveInt | None = Field(
        None, description="steps, warm-up included, after which cosine or linear is at its minimum"
    )
    lr_min_ratio: Fraction = Field(0.0, description="floor of the decay, as a share of lr")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="AdamW")
    eps: float = Field(1e-8, gt=0.0, description="AdamW")
    weight_decay: float = Field(0.01, ge=0.0, description="AdamW")
    grad_clip: float = Field(1.0, gt=0.0, description="maximal global gradient norm")
    ppo_mini_batch_size: PositiveInt | None = Field(
        None, description="prompts per optimiser step; default: data.train_batch_size (critic: as actor)"
    )
    ppo_epochs: PositiveInt = Field(1, description="passes over the experience per step")
    shuffle: bool = Field(False, description="mini-batches drawn in a new order in each epoch")
    ppo_micro_batch_size_per_gpu: PositiveInt | None = Field(
        None, description="rows per micro-batch; default: dynamic, by ppo_max_token_len_per_gpu"
    )
    ppo_max_token_len_per_gpu: PositiveInt = Field(16_384, description="token budget of a dynamic micro-batch")
    use_remove_padding: bool | None = Field(
        None, description="pack rows without padding; default: on GPU yes, on CPU no (length-sorted, trimmed padding)"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        Field("token-mean", description="how token losses become one number; denominators are the mini-batch's")
    )

    @model_validator(mode="after")
    def _decay_needs_an_end(self) -> TrainedModelConfig:
        if self.lr_schedule != "constant" and self.lr_decay_steps is None:
            raise ValueError(f"lr_schedule {self.lr_schedule!r} needs lr_decay_steps")
        return self


class ActorConfig(TrainedModelConfig):
    """The policy and its loss."""

    lr: float = Field(1e-6, ge=0.0, description="peak learning rate")
    loss_mode: LossMode = Field("vanilla", description="policy loss; vanilla: PPO clip with dual clip")
    clip_ratio: float = Field(0.2, gt=0.0, lt=1.0, description="PPO clip range")
    clip_ratio_low: float | None = Field(None, gt=0.0, lt=1.0, description="lower clip range; default clip_ratio")
    clip_ratio_high: float | None = Field(None, gt=0.0, description="upper clip range; default clip_ratio")
    clip_ratio_c: float = Field(3.0, gt=1.0, description="dual clip for negative advantages")
    entropy_coeff: float = Field(0.0, description="weight of the entropy bonus")
    use_kl_loss: bool = Field(False, description="add kl_loss_coef * KL(policy, reference) to the loss")
    kl_loss_coef: float = Field(0.001, ge=0.0, description="weight of the KL in the loss")
    kl_loss_type: KlLossType = Field(
        "low_var_kl", description="kl (k1) | abs | mse (k2) | low_var_kl (k3); with +: that value, k2's gradient"
    )


class CriticConfig(TrainedModelConfig):
    """The value model and its loss."""

    model: str = Field("", description="local folder or hub name; default: actor.model")
    lr: float = Field(1e-5, ge=0.0, description="peak learning rate")
    cliprange_value: float = Field(0.5, gt=0.0, description="range of the value clip around the old values")
    warmup_steps: int = Field(
        0, ge=0, description="how many first steps update the critic only (verl's critic_warmup counts one more)"
    )


class RewardConfig(Section):
    """Rule-based scoring of responses, in worker processes."""

    custom_function_path: Path | None = Field(None, description="Python file with a user's scoring function")
    custom_function_name: str = Field("compute_score", description="its name in that file")
    num_workers: PositiveInt = Field(1, description="scoring processes")
    timeout_s: float = Field(30.0, gt=0.0, description="seconds per call; a call that takes longer scores 0, counted")
    num_examine: int = Field(0, ge=0, description="training samples printed per data source and step")


class EvaluationConfig(Section):
    """Validation on held-out prompts."""

    test_freq: int = Field(-1, ge=-1, description="steps between validations; -1: only before and after the run")
    val_before_train: bool = Field(True, description="validate the initial policy (step 0)")
    n: PositiveInt = Field(1, description="responses per validation prompt")
    temperature: Temperature = Field(0.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus")
    top_k: int = Field(0, ge=0, description="0 keeps every token")
    batch_size: PositiveInt = Field(1024, description="prompts per Generate call")
    num_examine: int = Field(1, ge=0, description="samples printed per data source")
    min_accuracy: Fraction = Field(0.0, description="exit 1 if the final overall accuracy is lower; 0: off")


class CheckpointConfig(Section):
    """Pair checkpoints."""

    save_freq: int = Field(-1, ge=-1, description="steps between checkpoints; -1: none before the last step")
    save_last: bool = Field(True, description="a checkpoint after the last step; Ctrl-C saves in any case")
    keep: PositiveInt = Field(3, description="newest checkpoints kept")
    save_hf_model: bool = Field(False, description="also write Hugging Face folders")


class TrackingConfig(Section):
    """What is written down beside metrics.jsonl."""

    trackers: tuple[Literal["tensorboard"], ...] = Field(("tensorboard",), description="besides JSONL")
    sample_freq: int = Field(10, ge=-1, description="steps between printed sample generations; -1: off")
    num_samples: PositiveInt = Field(2, description="generations printed each time")
    dump_rollouts: bool = Field(False, description="write every training and validation rollout as JSONL")


class ServiceConfig(Section):
    """Where one group runs."""

    num_processes: PositiveInt = Field(1, description="ranks, started by services.launch: local")
    devices: Indices = Field((), description="GPU indices, one per rank; empty: CPU")
    cpus: Indices = Field((), description="CPU cores of the group; empty: all")
    threads: NumberOrAuto = Field(
        "auto",
        description="compute threads per process; auto: the permitted cores, divided between the ranks that compute on"
        " them (at most 8 beside a GPU); a resumed run keeps its number",
    )
    address: str = Field("", description="host:port the controller connects to (launch: external)")
    bind: str = Field("127.0.0.1:0", description="host:port rank 0 listens on; port 0 takes a free one")

    @model_validator(mode="after")
    def _one_device_per_rank(self) -> ServiceConfig:
        if self.devices and len(self.devices) != self.num_processes:
            raise ValueError(f"devices lists {len(self.devices)} GPUs for num_processes {self.num_processes}")
        return self


class ServicesConfig(Section):
    """The groups and how the controller reaches them."""

    launch: Literal["local", "external"] = Field("local", description="local: the controller starts both groups")
    actor: ServiceConfig = Field(default_factory=lambda: ServiceConfig.model_validate({}))
    critic: ServiceConfig = Field(default_factory=lambda: ServiceConfig.model_validate({}))
    allow_shared_devices: bool = Field(False, description="both groups may use the same GPUs, if memory allows")
    start_timeout_s: float = Field(300.0, gt=0.0, description="until a group answers")
    progress_timeout_s: float = Field(600.0, gt=0.0, description="longest silence of a running command")
    reconnect_timeout_s: float = Field(
        5.0, gt=0.0, description="how long a worker that cannot be reached is called again before its group is lost"
    )
    max_restarts: int = Field(
        3, ge=0, description="times that lost groups are restarted and restored; every step that is new starts afresh"
    )
    restart_backoff_s: float = Field(
        1.0, ge=0.0, description="pause before a restart; doubles with each one that brings no new step, up to 60 s"
    )
    max_queued_commands: PositiveInt = Field(16, description="mailbox bound of a service")
    max_batch_bytes: PositiveInt = Field(4 << 30, description="largest batch a service takes")
    max_held_bytes: PositiveInt = Field(
        16 << 30, description="bytes of all batches that a service holds, and of those on their way to it"
    )
    max_send_s: float = Field(300.0, gt=0.0, description="seconds that a client may take to send one batch")
    max_calls: PositiveInt = Field(64, description="calls that a service answers at a time, health checks aside")
    security: SecurityConfig = Field(default_factory=lambda: SecurityConfig.model_validate({}))

    @model_validator(mode="after")
    def _a_batch_fits_into_what_is_held(self) -> ServicesConfig:
        if self.max_held_bytes < self.max_batch_bytes:
            raise ValueError(
                f"max_held_bytes ({self.max_held_bytes}) must be at least max_batch_bytes ({self.max_batch_bytes})"
            )
        return self


class Config(Section):
    """The whole configuration of a run."""

    run: RunConfig
    data: DataConfig
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig.model_validate({}))
    algorithm: AlgorithmConfig = Field(default_factory=lambda: AlgorithmConfig.model_validate({}))
    actor: ActorConfig
    critic: CriticConfig = Field(default_factory=lambda: CriticConfig.model_validate({}))
    reward: RewardConfig = Field(default_factory=lambda: RewardConfig.model_validate({}))
    evaluation: EvaluationConfig = Field(default_factory=lambda: EvaluationConfig.model_validate({}))
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig.model_validate({}))
    tracking: TrackingConfig = Field(default_factory=lambda: TrackingConfig.model_validate({}))
    services: ServicesConfig = Field(default_factory=lambda: ServicesConfig.model_validate({}))
    debug: DebugConfig = Field(default_factory=lambda: DebugConfig.model_validate({}))

    @model_validator(mode="before")
    @classmethod
    def _derived_defaults(cls, tree: Any) -> Any:
        """Fills the defaults that come from another section, so that the resolved config shows them."""
        if not isinstance(tree, dict):
            return tree
        sections = {
            name: dict(tree.get(name) or {})
            for name in ("actor", "critic", "data", "rollout")
            if tree.get(name) is None or isinstance(tree[name], dict)
        }
        actor, critic, data, rollout = (sections.get(name, {}) for name in ("actor", "critic", "data", "rollout"))
        if actor.get("ppo_mini_batch_size") is None and "train_batch_size" in data:
            actor["ppo_mini_batch_size"] = data["train_batch_size"]
        if "model" in actor and not critic.get("model"):
            critic["model"] = actor["model"]
        if critic.get("ppo_mini_batch_size") is None:
            critic["ppo_mini_batch_size"] = actor.get("ppo_mini_batch_size")
        if data and data.get("tokenizer") is None:
            data["tokenizer"] = actor.get("model")
        if rollout.get("check_freq") is None:
            rollout["check_freq"] = 0 if rollout.get("backend", "hf") == "hf" else 1
        if rollout.get("max_log_prob_diff") is None:
            rollout["max_log_prob_diff"] = 1e-3 if actor.get("dtype", "fp32") == "fp32" else 2.0
        absent = {name for name in ("actor", "data") if tree.get(name) is None}
        sections = {name: section for name, section in sections.items() if name not in absent}
        return {**tree, **sections}

    @model_validator(mode="after")
    def _groups_share_no_gpu(self) -> Config:
        if self.shared_devices and not self.services.allow_shared_devices:
            raise ValueError(
                f"services.actor.devices {list(self.services.actor.devices)} and services.critic.devices"
                f" {list(self.services.critic.devices)} overlap; give each group its own GPUs, or set"
                " services.allow_shared_devices"
            )
        return self

    @model_validator(mode="after")
    def _failpoints_stay_here(self) -> Config:
        if not self.debug.failpoints:
            return self
        for role, service in (("actor", self.services.actor), ("critic", self.services.critic)):
            for key, address in (("bind", service.bind), ("address", service.address)):
                if address and not is_loopback(address):
                    raise ValueError(
                        "debug.failpoints is for tests on one machine: expected a loopback address in"
                        f" services.{role}.{key}, got {address!r}; remove debug.failpoints"
                    )
        return self

    @model_validator(mode="after")
    def _plaintext_stays_on_this_machine(self) -> Config:
        services = self.services
        if services.security.tls:
            return self
        for role in ("actor", "critic") if self.uses_critic else ("actor",):
            service: ServiceConfig = getattr(services, role)
            called = {"address": service.address} if services.launch == "external" and service.address else {}
            for key, address in {"bind": service.bind, **called}.items():
                if not is_loopback(address):
                    raise ValueError(
                        f"services.{role}.{key} is {address!r}, which is not a loopback address, and the wire would be"
                        " neither encrypted nor authenticated there: set services.security.tls, with ca_file,"
                        " cert_file and key_file, or use 127.0.0.1"
                    )
        return self

    @property
    def shared_devices(self) -> tuple[int, ...]:
        """GPUs of this machine that both groups would use."""
        if self.services.launch == "external" or not self.uses_critic:
            return ()
        return tuple(sorted(set(self.services.actor.devices) & set(self.services.critic.devices)))

    @property
    def uses_critic(self) -> bool:
        """A critic group exists iff the estimator needs values."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def uses_reference(self) -> bool:
        """A reference exists iff KL is used, in the reward or in the loss."""
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss
