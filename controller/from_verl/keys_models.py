"""verl's keys of policy, value model and reference: `actor_rollout_ref.{actor,model,ref}` and `critic`."""

from collections.abc import Iterator
from typing import Any, get_args

from controller.from_verl.row import NotNeeded, NotSupported, Row, changed, not_needed, slower, taken, unsupported
from controller.from_verl.run import VerlRun
from controller.from_verl.settings import num_of
from splitppo.config.models import KlLossType
from splitppo.config.policy_loss import LOSS_MODES, SEQUENCE_LOSSES, PolicyLossConfig

_ACTOR, _MODEL, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.ref"
_MICRO_BATCHES = "what is only computed goes in the micro-batches of {}.ppo_*_per_gpu"
_SPEED = "speed and memory only"
_MORE_GPUS = "nothing is moved to the host: more GPUs share the model; `--check` prints the memory"
_OF_SINGLE_LOSSES = {
    key: PolicyLossConfig.model_fields[key].default
    for key in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
}
_EVERYTHING = ("model", "optimizer", "extra")


def _steps_or_refuse(run: VerlRun, for_what: str) -> int:
    steps = run.num_steps()
    if steps is None:
        raise NotSupported(
            f"{for_what} needs the number of steps, and data.train_files are not here to be counted: add"
            " trainer.total_training_steps=N"
        )
    return steps


class _Trained:
    """How the keys of one trained model are converted; `verl` and `ours` are the sections' names."""

    def __init__(self, verl: str, ours: str) -> None:
        self.verl, self.ours = verl, ours

    def _of(self, run: VerlRun, key: str) -> Any:
        return run.value(f"{self.verl}.{key}")

    def mini_batch(self, value: Any, run: VerlRun) -> Any:
        """None where the critic's is the actor's, as it is by default here."""
        is_actors = self.ours == "critic" and value == run.value(f"{_ACTOR}.ppo_mini_batch_size")
        return None if is_actors else value

    def micro_batch(self, value: Any, run: VerlRun) -> Any:
        if self._of(run, "use_dynamic_bsz"):
            raise NotNeeded("use_dynamic_bsz takes micro-batches by tokens")
        return value

    def token_budget(self, value: Any, run: VerlRun) -> Any:
        if not self._of(run, "use_dynamic_bsz"):
            raise NotNeeded("only with use_dynamic_bsz")
        return max(int(num_of(value, f"{self.verl}.ppo_max_token_len_per_gpu")), run.longest_row)

    def grad_clip(self, value: Any, run: VerlRun) -> Any:
        """The engines of verl read optim.clip_grad, its older workers grad_clip."""
        if run.settings.is_given(f"{self.verl}.optim.clip_grad"):
            raise NotNeeded("optim.clip_grad is given, too, and is the one that verl's engines read")
        return value

    def warmup_steps(self, value: Any, _: VerlRun) -> Any:
        if value is None or num_of(value, "lr_warmup_steps") <= 0:
            raise NotNeeded("lr_warmup_steps_ratio says it")
        return int(value)

    def warmup_ratio(self, value: Any, run: VerlRun) -> Any:
        steps = self._of(run, "optim.lr_warmup_steps")
        if steps is not None and num_of(steps, "lr_warmup_steps") > 0:
            raise NotNeeded("lr_warmup_steps is given, too, and wins")
        if not num_of(value, f"{self.verl}.optim.lr_warmup_steps_ratio"):
            return 0
        return int(value * _steps_or_refuse(run, "a share of the steps"))

    def _schedule(self, run: VerlRun) -> Any:
        return self._of(run, "optim.warmup_style") or self._of(run, "optim.lr_scheduler_type")

    def schedule(self, value: Any, run: VerlRun) -> Any:
        if value is None:
            raise NotNeeded("lr_scheduler_type says it")
        if self._schedule(run) not in ("constant", "cosine"):
            raise NotSupported(f"constant or cosine ({self.ours}.lr_schedule: linear is new here)")
        return self._schedule(run)

    def decay_steps(self, _: Any, run: VerlRun) -> Any:
        if self._schedule(run) != "cosine":
            raise NotNeeded("only with lr_scheduler_type cosine")
        return _steps_or_refuse(run, "a decay over the whole run")

    def min_ratio(self, value: Any, run: VerlRun) -> Any:
        if self._schedule(run) != "cosine":
            raise NotNeeded("only with lr_scheduler_type cosine")
        return value or 0.0

    def aggregation(self, value: Any, run: VerlRun) -> Any:
        """Of losses over sequences verl takes their papers', whatever is set; here that is their default."""
        if self.ours == "actor" and run.value(f"{_ACTOR}.policy_loss.loss_mode") in SEQUENCE_LOSSES:
            raise NotNeeded(f"{', '.join(SEQUENCE_LOSSES)} are aggregated by seq-mean-token-mean in both")
        return value


def _dtype(value: Any, _: VerlRun) -> str:
    known = {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}
    if value not in known:
        raise NotSupported("bf16 or fp32")
    return known[value]


def _hf_model(value: Any, _: VerlRun) -> bool:
    contents = value if isinstance(value, list) else [value]
    return "hf_model" in contents


def _loss_mode(value: Any, _: VerlRun) -> Any:
    if value not in LOSS_MODES:
        known = f"losses here: {', '.join(LOSS_MODES)}"
        raise NotSupported(f"{known}; one of your own is a function in the file actor.policy_loss.custom_path")
    return value


def _kl_type(value: Any, _: VerlRun) -> Any:
    if value not in get_args(KlLossType):
        raise NotSupported(f"one of {', '.join(get_args(KlLossType))}")
    return value


def _clip(value: Any, run: VerlRun) -> Any:
    """None where it is clip_ratio."""
    return None if value == run.value(f"{_ACTOR}.clip_ratio") else value


def _trained(verl: str, model: str, engine: str, ours: str) -> Iterator[Row]:
    """What the sections of actor and critic have in common; `engine` are FSDP's keys."""
    of = _Trained(verl, ours)

    def inherited(key: str, value: Any) -> Any:
        """The critic's default is what the actor has."""
        return f"${{{_ACTOR}.{key}}}" if ours == "critic" else value

    yield taken(f"{verl}.optim.lr", f"{ours}.lr", 1e-6 if ours == "actor" else 1e-5)
    yield changed(
        f"{verl}.optim.lr_warmup_steps",
        f"{ours}.lr_warmup_steps",
        "the first step has lr / steps here, 0 there",
        of.warmup_steps,
        -1,
    )
    yield changed(
        f"{verl}.optim.lr_warmup_steps_ratio",
        f"{ours}.lr_warmup_steps",
        "the share times the number of steps, rounded down",
        of.warmup_ratio,
        0.0,
    )
    yield taken(f"{verl}.optim.lr_scheduler_type", f"{ours}.lr_schedule", "constant", convert=of.schedule)
    yield changed(
        f"{verl}.optim.warmup_style", f"{ours}.lr_schedule", "the old name of lr_scheduler_type", of.schedule, None
    )
    yield changed(
        f"{verl}.optim.total_training_steps",
        f"{ours}.lr_decay_steps",
        "the run's steps, as verl sets it itself",
        of.decay_steps,
        -1,
    )
    yield taken(f"{verl}.optim.min_lr_ratio", f"{ours}.lr_min_ratio", 0.0, convert=of.min_ratio)
    yield taken(f"{verl}.optim.weight_decay", f"{ours}.weight_decay", 0.01)
    yield taken(f"{verl}.optim.betas", f"{ours}.betas", [0.9, 0.999])
    yield taken(f"{verl}.optim.clip_grad", f"{ours}.grad_clip", 1.0)
    yield taken(f"{verl}.grad_clip", f"{ours}.grad_clip", 1.0, convert=of.grad_clip)
    yield unsupported(f"{verl}.optim.optimizer", "AdamW", "AdamW", "adam", default="AdamW")
    yield unsupported(f"{verl}.optim.optimizer_impl", "torch.optim's AdamW", "torch.optim", default="torch.optim")
    yield unsupported(f"{verl}.optim.override_optimizer_config", "betas, eps and weight_decay are keys of their own")
    yield unsupported(f"{verl}.optim.num_cycles", "half a cosine", 0.5, default=0.5)
    yield unsupported(f"{verl}.optim.zero_indexed_step", "the decay begins at lr", True, default=True)
    yield unsupported(
        f"{verl}.optim.{{lr_warmup_init,lr_decay_steps,lr_decay_style,min_lr,weight_decay_incr_style}}",
        "lr_scheduler_type, lr_warmup_steps, min_lr_ratio",
        0.0,
        "constant",
    )
    yield not_needed(f"{verl}.optim.{{muon_*,lr_wsd_*,*_dtype,use_*}}", "only with Megatron's optimizers")
    yield taken(
        f"{verl}.ppo_mini_batch_size",
        f"{ours}.ppo_mini_batch_size",
        inherited("ppo_mini_batch_size", 256),
        convert=of.mini_batch,
        note="prompts, in both",
    )
    yield taken(
        f"{verl}.ppo_micro_batch_size_per_gpu", f"{ours}.ppo_micro_batch_size_per_gpu", None, convert=of.micro_batch
    )
    yield slower(
        f"{verl}.ppo_micro_batch_size",
        f"{ours}.ppo_micro_batch_size_per_gpu, or none: micro-batches are then taken by tokens",
    )
    yield not_needed(
        f"{verl}.use_dynamic_bsz",
        f"the rule here, unless {ours}.ppo_micro_batch_size_per_gpu is set",
        inherited("use_dynamic_bsz", False),
    )
    yield changed(
        f"{verl}.ppo_max_token_len_per_gpu",
        f"{ours}.ppo_max_token_len_per_gpu",
        "at least the longest row: rows are not cut over GPUs",
        of.token_budget,
        16384 if ours == "actor" else 32768,
    )
    yield taken(f"{verl}.ppo_epochs", f"{ours}.ppo_epochs", inherited("ppo_epochs", 1))
    yield taken(f"{verl}.shuffle", f"{ours}.shuffle", inherited("shuffle", False))
    yield not_needed(f"{verl}.data_loader_seed", "run.seed seeds all")
    yield taken(
        f"{verl}.loss_agg_mode",
        f"{ours}.loss_agg_mode",
        inherited("loss_agg_mode", "token-mean"),
        convert=of.aggregation,
    )
    yield taken(f"{verl}.loss_scale_factor", f"{ours}.loss_scale_factor", None)
    yield taken(f"{model}.enable_gradient_checkpointing", f"{ours}.gradient_checkpointing", True)
    yield changed(
        f"{engine}.dtype", f"{ours}.dtype", "compute; master weights and optimizer are fp32", _dtype, "bfloat16"
    )
    yield changed(
        f"{verl}.checkpoint.save_contents",
        "checkpoint.save_hf_model",
        "model, optimizer and the rest are always saved",
        _hf_model,
        [*_EVERYTHING],
    )
    yield slower(
        f"{verl}.checkpoint.load_contents",
        "a checkpoint is loaded as a whole",
        [*_EVERYTHING],
        [*_EVERYTHING, "hf_model"],
    )
    yield not_needed(f"{verl}.checkpoint.**", "always written in the background, whole or not at all")
    yield unsupported(f"{engine}.model_dtype", "master weights are fp32", "fp32", "float32", default="fp32")
    yield unsupported(f"{engine}.mixed_precision.**", f"{ours}.dtype; gradients are reduced in fp32")
    yield slower(f"{engine}.{{param_offload,optimizer_offload,offload_policy,grad_offload}}", _MORE_GPUS)
    yield unsupported(f"{{{engine},{verl}}}.qat.enable", "no quantization in training")
    yield slower(
        f"{{{engine},{verl}}}.ulysses_sequence_parallel_size",
        "rows are not cut over GPUs: lower ppo_max_token_len_per_gpu",
        1,
    )
    yield not_needed(f"{engine}.{{seed,full_determinism}}", "a run is a function of run.seed")
    yield slower(f"{engine}.strategy", "FSDP2 over all ranks of a group", "fsdp", "fsdp2", default="fsdp")
    yield slower(f"{verl}.strategy", "FSDP2 over all ranks of a group", "fsdp", "fsdp2", default="fsdp")
    yield not_needed(f"{verl}.{{megatron,veomni,torchtitan,automodel}}.**", "FSDP2 over all ranks of a group")
    yield not_needed(f"{engine}.**", "FSDP2 shards as it needs to: speed and memory only")
    yield not_needed(f"{verl}.{{fsdp_config,fsdp,qat}}.**", _SPEED)
    yield not_needed(f"{verl}.profiler.**", "trace.json has every call of a step, for Perfetto")
    yield not_needed(
        f"{verl}.{{rollout_n,nccl_timeout,load_weight}}", "rollout.n; services.progress_timeout_s; always loaded"
    )
    yield not_needed(
        f"{verl}.{{entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,entropy_checkpointing}}",
        "logits are always taken in pieces",
    )
    yield not_needed(
        f"{verl}.{{pad_to_length,use_remove_padding,use_torch_compile,use_fused_kernels,use_prefix_grouper}}", _SPEED
    )
    yield unsupported(f"{model}.{{lora_rank,lora.rank}}", "full fine-tuning", 0)
    yield unsupported(f"{model}.{{lora_adapter_path,lora.adapter_path}}", "merge the adapter into a model folder first")
    yield not_needed(f"{model}.{{lora_alpha,target_modules,exclude_modules,lora.*}}", "only with LoRA")
    yield not_needed(
        f"{model}.override_config.attn_implementation", "the fastest one that the model and this machine have"
    )
    yield not_needed(
        f"{model}.override_config.{{attention_dropout,attn_dropout,embd_pdrop,resid_pdrop,hidden_dropout}}",
        "all dropout is 0",
    )
    yield unsupported(f"{model}.override_config.**", "write it into the model folder's config.json")
    yield unsupported(f"{model}.{{override_config,hf_config_path}}", "write it into the model folder's config.json")
    yield unsupported(f"{model}.external_lib", "models are those of transformers")
    yield unsupported(f"{model}.mtp.{{enable,enable_train,enable_rollout}}", "no multi-token prediction")
    yield not_needed(f"{model}.mtp.**", "only with multi-token prediction")
    yield not_needed(f"{model}.trust_remote_code", "a model that brings its own code is refused when it is loaded")
    yield slower(
        f"{model}.{{enable_activation_offload,tiled_mlp.enabled}}",
        f"{ours}.gradient_checkpointing, lower {ours}.ppo_max_token_len_per_gpu",
    )
    yield not_needed(
        f"{model}.{{use_shm,use_remove_padding,use_liger,use_fused_kernels,fused_kernel_options.**,tiled_mlp.num_shards}}",
        _SPEED,
    )


def _actor() -> Iterator[Row]:
    yield taken(f"{_MODEL}.path", "actor.model", "~/models/deepseek-llm-7b-chat")
    yield changed(f"{_MODEL}.tokenizer_path", "data.tokenizer", "the policy's tokenizer", default=None)
    yield unsupported(f"{_MODEL}.custom_chat_template", "write it to a file, and name that in data.chat_template")
    yield taken(f"{_ACTOR}.clip_ratio", "actor.clip_ratio", 0.2)
    for side in ("low", "high"):
        yield changed(
            f"{_ACTOR}.clip_ratio_{side}",
            f"actor.clip_ratio_{side}",
            "there 0.2 unless given, whatever clip_ratio is",
            _clip,
            0.2,
        )
    yield taken(f"{_ACTOR}.clip_ratio_c", "actor.clip_ratio_c", 3.0)
    yield taken(f"{_ACTOR}.policy_loss.loss_mode", "actor.policy_loss.loss_mode", "vanilla", convert=_loss_mode)
    for key, default in _OF_SINGLE_LOSSES.items():
        yield taken(f"{_ACTOR}.policy_loss.{key}", f"actor.policy_loss.{key}", default)
    for key in ("tau_pos", "tau_neg"):
        yield taken(f"{_ACTOR}.{key}", f"actor.policy_loss.{key}", PolicyLossConfig.model_fields[key].default)
    yield not_needed(f"{_ACTOR}.policy_loss.rollout_correction.**", "algorithm.rollout_correction says it")
    yield unsupported(f"{_ACTOR}.policy_loss.*", f"losses here: {', '.join(LOSS_MODES)}")
    yield unsupported(
        f"{_ACTOR}.tis_imp_ratio_cap", "algorithm.rollout_correction: rollout_is token, rollout_is_threshold", -1
    )
    yield taken(f"{_ACTOR}.entropy_coeff", "actor.entropy_coeff", 0)
    for key, ours in (
        ("use_adaptive_entropy_adjustment", "enable"),
        *((name, name) for name in ("target_entropy", "entropy_coeff_delta", "min_entropy_coeff", "max_entropy_coeff")),
    ):
        yield taken(f"{_ACTOR}.{key}", f"algorithm.adaptive_entropy.{ours}", note="of Skywork-OR1's fork")
    yield not_needed(f"{_ACTOR}.{{calculate_entropy,calculate_sum_pi_squared}}", "actor/entropy is always measured")
    yield taken(f"{_ACTOR}.use_kl_loss", "actor.use_kl_loss", False)
    yield taken(f"{_ACTOR}.kl_loss_coef", "actor.kl_loss_coef", 0.001)
    yield taken(f"{_ACTOR}.kl_loss_type", "actor.kl_loss_type", "low_var_kl", convert=_kl_type)
    yield unsupported(f"{_ACTOR}.router_replay.mode", "no replay of expert routing", "disabled")
    yield not_needed(f"{_ACTOR}.{{freeze_vision_tower,router_replay.*}}", "text only")
    yield from _trained(_ACTOR, _MODEL, f"{_ACTOR}.fsdp_config", "actor")


def _reference() -> Iterator[Row]:
    yield unsupported(f"{_REF}.model", "the reference is the model that the policy starts from")
    yield unsupported(f"{_REF}.model.**", "the reference is the model that the policy starts from")
    yield not_needed(f"{_REF}.log_prob_*", _MICRO_BATCHES.format("actor"))
    yield not_needed(
        f"{_REF}.fsdp_config.**", "the reference is frozen and sharded over its group, placement.reference"
    )
    yield not_needed(
        f"{_REF}.**", "the reference is computed as the actor is, in the group that placement.reference names"
    )


def _critic() -> Iterator[Row]:
    yield taken("critic.model.path", "critic.model", convert=_critic_model)
    yield not_needed("critic.model.tokenizer_path", "the policy's tokenizer")
    yield not_needed("critic.model.custom_chat_template", "the policy's")
    yield changed("critic.enable", "", "there is a critic where the estimator needs values", _critic_enable)
    yield taken("critic.cliprange_value", "critic.cliprange_value", 0.5)
    yield not_needed(
        "critic.{forward_max_token_len_per_gpu,forward_micro_batch_size,forward_micro_batch_size_per_gpu}",
        _MICRO_BATCHES.format("critic"),
    )
    # The engine's keys were under critic.model before they moved.
    yield changed(
        "critic.model.fsdp_config.dtype", "critic.dtype", "compute; master weights and optimizer are fp32", _dtype
    )
    yield slower(
        "critic.model.fsdp_config.{param_offload,optimizer_offload,offload_policy,grad_offload}",
        _MORE_GPUS,
    )
    yield not_needed("critic.model.fsdp_config.**", "FSDP2 shards as it needs to: speed and memory only")
    yield from _trained("critic", "critic.model", "critic.fsdp", "critic")


def _critic_model(value: Any, run: VerlRun) -> Any:
    """None where it is the actor's, as it is by default here."""
    return None if value == run.value(f"{_MODEL}.path") else value


def _critic_enable(value: Any, run: VerlRun) -> Any:
    if value is None or bool(value) == run.uses_critic:
        raise NotNeeded("there is a critic where the estimator needs values")
    if value:
        raise NotNeeded("values that the estimator does not use are not learned")
    raise NotSupported("another algorithm.adv_estimator than gae")


MODEL_ROWS: tuple[Row, ...] = (*_actor(), *_reference(), *_critic())
