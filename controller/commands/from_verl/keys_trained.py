"""Converts the verl keys that policy and value model share (optimizer, batches, loss, engine) into keys of SplitPPO."""

from collections.abc import Iterator
from functools import partial
from math import gcd
from typing import Any

from controller.commands.from_verl.keys_engines import (
    COMPUTE,
    ENGINES,
    MASTERS,
    OF_MTP,
    OF_QAT,
    SPEED,
    any_engine,
    compute_dtype,
    engine_dtypes,
    is_short_type,
    rest_of_engines,
)
from controller.commands.from_verl.row import (
    Convert,
    Noted,
    NotNeeded,
    NotSupported,
    Row,
    Section,
    none_if_same_as,
    only_if,
)
from controller.commands.from_verl.run import VerlRun
from controller.commands.from_verl.settings import num_of
from splitppo.config.sections.models import is_dropout
from splitppo.config.subsections.policy_loss import SEQUENCE_LOSSES

ACTOR = "actor_rollout_ref.actor"
_OFFLOAD_POLICY = "it copies weights for every layer, and steps on the CPU; with our keys the GPU computes"
_FSDP2 = "FSDP2 over the ranks of a group"
_LORA = "only with LoRA"
# Megatron's names of linear layers, and those of Hugging Face models.
_LINEAR = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
_STATE = "gradients are fp32, the state of the optimizer has the type of optimizer_state_dtype"
# Names of Megatron's optimizers that need no key, by reason.
_OPTIMIZER = {
    "only with the optimizer muon": """muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec
        muon_match_adamw_update_rms muon_momentum muon_nesterov muon_num_ns_steps muon_scalar_optimizer muon_scale_mode
        muon_split_qkv muon_tp_mode""",
    "lr_schedule is of WSD's decay": "lr_wsd_decay_style",
    "the rate of a resumed run is that of its step": "use_checkpoint_opt_param_scheduler",
    SPEED: "use_layer_wise_distributed_optimizer use_precision_aware_optimizer",
}
_BEFORE_0_7_1 = (
    "here, as in verl since 0.7.1, also divided by the number of sequences: the gradient has another scale, which AdamW"
    " evens out, but grad_clip does not"
)
_EVERYTHING = ["model", "optimizer", "extra"]


class _Trained:
    """Conversions from verl to SplitPPO for the values of one trained model, the actor or the critic."""

    def __init__(self, section: Section, engine: str) -> None:
        self.verl = section.verl
        self.ours = section.ours
        self.engine = engine
        decays = "only with a learning rate that decays"
        decaying = partial(only_if, lambda _, run: self._schedule(run) != "constant", decays)
        self.decay_steps = decaying(self._decay_steps)
        self.min_lr = decaying(self._min_lr)
        self.min_ratio = decaying(lambda value, _: value or 0.0)

    def _of(self, run: VerlRun, key: str) -> Any:
        return run.value(f"{self.verl}.{key}")

    def _number(self, run: VerlRun, key: str) -> float:
        return run.settings.number(f"{self.verl}.{key}")

    def micro_batch(self, value: Any, run: VerlRun) -> Any:
        if self._of(run, "use_dynamic_bsz"):
            raise NotNeeded("with use_dynamic_bsz micro-batches are cut by tokens")
        return value

    def token_budget(self, value: Any, run: VerlRun) -> Any:
        """Returns the tokens of a micro-batch of a rank: as in verl, but enough for the part of the longest row."""
        if not self._of(run, "use_dynamic_bsz"):
            raise NotNeeded("only with use_dynamic_bsz")
        longest = -(-run.longest_context // self._sequence_ranks(run))
        return max(int(num_of(value, f"{self.verl}.ppo_max_token_len_per_gpu")), longest)

    def grad_clip(self, value: Any, run: VerlRun) -> Any:
        """Returns the gradient clip that older workers of verl read; NotNeeded if the newer optim.clip_grad is set."""
        if f"{self.verl}.optim.clip_grad" in run.settings.given:
            raise NotNeeded("optim.clip_grad is given too, and verl's engines read only that key")
        return value

    def warmup_steps(self, value: Any, run: VerlRun) -> Any:
        if not self._has_warmup_steps(value, run):
            raise NotNeeded("lr_warmup_steps_ratio sets it")
        return int(value)

    def _has_warmup_steps(self, value: Any, run: VerlRun) -> bool:
        """Returns True if verl takes the number of steps and not the share: up to 0.7 also a 0, later only more."""
        least = 0 if run.settings.version < (0, 8) else 1
        return value is not None and num_of(value, "lr_warmup_steps") >= least

    def warmup_ratio(self, value: Any, run: VerlRun) -> Any:
        """Returns the share of warm-up steps, or their number if verl's decay end is known; NotNeeded: verl ignores it.

        verl takes the share of the step at which its decay ends, SplitPPO of the run's steps. The two may differ, so a
        number of steps is set where verl's keys tell that step.
        """
        given_steps = self._of(run, "optim.lr_warmup_steps")
        if self._has_warmup_steps(given_steps, run):
            raise NotNeeded("lr_warmup_steps is given too, and counts")
        share = num_of(value, f"{self.verl}.optim.lr_warmup_steps_ratio")
        decay_end = self._decay_steps(None, run)
        if share and decay_end is not None:
            return Noted(int(share * decay_end), f"{share:g} of {decay_end} steps", f"{self.ours}.lr_warmup_steps")
        return share

    def _schedule(self, run: VerlRun) -> Any:
        """Returns the name of the learning-rate schedule, from verl's key for FSDP, Megatron or Torchtitan."""
        names = (self._of(run, f"optim.{key}") for key in ("warmup_style", "lr_decay_style", "decay_type"))
        style = next(filter(None, names), None)
        if style == "WSD":
            return self._of(run, "optim.lr_wsd_decay_style") or "exponential"
        return style or self._of(run, "optim.lr_scheduler_type")

    def schedule(self, value: Any, run: VerlRun) -> Any:
        """Returns the learning-rate schedule; NotNeeded for a key whose value is not the one that verl takes.

        WSD stands for the schedule of its last phase: `stable_steps` gives the phase before.
        """
        if value not in ("WSD", self._schedule(run)):
            raise NotNeeded("another key sets it: lr_scheduler_type, or Megatron's lr_decay_style")
        if self._schedule(run) not in ("constant", "cosine", "linear"):
            raise NotSupported("constant, cosine or linear, or WSD with lr_wsd_decay_style cosine or linear")
        return self._schedule(run)

    def model_dtype(self, value: Any, run: VerlRun) -> Any:
        """Returns "fp32", the type of trained weights; NotNeeded if verl has the same, or trains adapters alone."""
        model = "actor_rollout_ref.model" if self.ours == "actor" else f"{self.verl}.model"
        if value in (None, "fp32", "float32") or rank_of_adapters(run, model):
            raise NotNeeded("trained weights are fp32, frozen ones have the dtype of the computation")
        if not is_short_type(value):
            raise NotSupported("master weights are fp32")
        return "fp32"

    def fsdp_size(self, value: Any, run: VerlRun) -> int:
        """Returns the ranks that divide the weights; -1, all, if verl's number does not divide those of our group."""
        ranks = self._ranks(run)
        size = int(num_of(value, f"{self.verl}.fsdp_size"))
        return size if 0 < size < ranks and ranks % size == 0 else -1

    def sequence_size(self, value: Any, run: VerlRun) -> int:
        """Returns how many ranks divide the positions of rows: verl's number, or the part that divides our ranks."""
        size = run.value(f"{self.engine}.fsdp_size")
        shards = -1 if size is None else self.fsdp_size(size, run)
        ranks = self._ranks(run) if shards == -1 else shards
        return gcd(max(1, int(num_of(value, f"{self.verl}.ulysses_sequence_parallel_size"))), ranks)

    def _sequence_ranks(self, run: VerlRun) -> int:
        sizes = (run.value(f"{of}.ulysses_sequence_parallel_size") for of in (self.engine, self.verl))
        return max(self.sequence_size(size, run) for size in (1, *sizes) if size is not None)

    def _ranks(self, run: VerlRun) -> int:
        return run.groups.critic if self.ours == "critic" else run.groups.actor

    def _decay_steps(self, _: Any, run: VerlRun) -> int | None:
        """Returns the step at which verl's decay ends; None: the run's last one, which its files and epochs set."""
        keys = (f"{self.verl}.optim.lr_decay_steps", "trainer.total_training_steps")
        return next((int(run.settings.number(key)) for key in keys if run.value(key)), None)

    def stable_steps(self, _: Any, run: VerlRun) -> Any:
        """Returns the stable steps of verl's schedule WSD (warm-up, stable, decay), which has keys for the others.

        They are end - warm-up - decay. Raises NotSupported if the script does not give the step at which the decay
        ends.
        """
        if self._of(run, "optim.lr_decay_style") != "WSD":
            raise NotNeeded("only with lr_decay_style WSD")
        end = self._decay_steps(None, run)
        if end is None:
            raise NotSupported("a decay at the end needs the number of steps: add trainer.total_training_steps=N")
        warmup = int(self._number(run, "optim.lr_warmup_steps"))
        if warmup <= 0:
            warmup = int(self._number(run, "optim.lr_warmup_steps_ratio") * end)
        return end - warmup - int(self._number(run, "optim.lr_wsd_decay_steps"))

    def _min_lr(self, _: Any, run: VerlRun) -> Any:
        return self._number(run, "optim.min_lr") / self._number(run, "optim.lr")

    def aggregation(self, value: Any, run: VerlRun) -> Any:
        """Returns how verl aggregates the loss over tokens; NotNeeded for sequence losses, which fix it."""
        if self.ours == "actor" and run.value(f"{ACTOR}.policy_loss.loss_mode") in SEQUENCE_LOSSES:
            raise NotNeeded(
                f"{', '.join(SEQUENCE_LOSSES)} are always aggregated by seq-mean-token-mean, here and in verl; but"
                " verl 0.9.1 aggregates gspo as set"
            )
        if value == "seq-mean-token-sum-norm" and run.settings.version < (0, 7, 1):
            return Noted(value, _BEFORE_0_7_1)
        return value


def _override_config(value: Any, _: VerlRun) -> dict[str, Any]:
    """Returns the attributes of verl's override_config for config.json of the model; NotSupported for dropout above 0.

    Older workers of verl for Megatron have the attributes under `model_config`.
    """
    attributes = {**(value or {})}
    if any((attributes.pop("moe_config", None) or {}).values()):
        raise NotSupported("moe_config: the router is trained, too")
    attributes |= attributes.pop("model_config", None) or {}
    attributes.pop("attn_implementation", None)
    if any(attributes[name] for name in attributes if is_dropout(name)):
        raise NotSupported("all dropout is 0")
    return {name: attribute for name, attribute in attributes.items() if not is_dropout(name)}


def rank_of_adapters(run: VerlRun, model: str) -> Any:
    """Returns the rank of the adapters that verl trains, by its section of a model; 0 or None without adapters.

    The section `lora` is Megatron's, and counts if its rank is not 0.
    """
    return run.value(f"{model}.lora.rank") or run.value(f"{model}.lora_rank")


def _strategy(value: Any, _: VerlRun) -> str:
    if value not in ("fsdp", "fsdp2"):
        raise NotSupported(_FSDP2, changes_results=False)
    return "fsdp2"


def _layers(value: Any) -> Any:
    """Returns the names of linear layers; those of Megatron become names of Hugging Face models."""
    if value is None or (isinstance(value, str) and value not in _LINEAR):
        return value
    names = value if isinstance(value, list) else [value]
    if {*names} == _LINEAR.keys():
        return "all-linear"
    return [layer for name in names for layer in _LINEAR.get(name, (name,))]


def _hf_model(value: Any, _: VerlRun) -> bool:
    return "hf_model" in (value if isinstance(value, list) else [value])


def trained(section: Section, *, model: str, engine: str) -> Iterator[Row]:
    """Yields the table rows of the verl keys that the sections of actor and critic have in common.

    `model` and `engine` are the names of verl's sections with the keys of the model and of FSDP.
    """
    of = _Trained(section, engine)
    yield from _optimizer(section, of)
    yield from _batches(section, of)
    yield from _engine(section, Section(model, section.ours), Section(engine, section.ours), of)
    yield from _model(section.ours, Section(model, section.ours))


def _optimizer(trained: Section, of: _Trained) -> Iterator[Row]:
    """Yields the table rows of one model's optimizer and learning-rate schedule, under the names of all verl's engines.

    `of` has the conversions that depend on other keys of the same model.
    """
    optim = Section(f"{trained.verl}.optim", trained.ours)
    ours = trained.ours
    yield optim.taken("lr", 1e-6 if ours == "actor" else 1e-5)
    first_step = "the first step has lr / steps here, 0 in verl"
    yield optim.changed("lr_warmup_steps", "lr_warmup_steps", first_step, of.warmup_steps, -1)
    first_of_share = f"{first_step}; lr_warmup_steps if the script has the number of steps"
    yield optim.changed("lr_warmup_steps_ratio", "lr_warmup_steps_ratio", first_of_share, of.warmup_ratio, 0.0)
    yield optim.renamed("lr_scheduler_type", "lr_schedule", "constant", of.schedule)
    yield optim.changed("warmup_style", "lr_schedule", "the old name of lr_scheduler_type", of.schedule, None)
    yield optim.changed("total_training_steps", "lr_decay_steps", "the run's steps, as in verl", of.decay_steps, -1)
    for key in ("lr_decay_style", "decay_type"):
        yield optim.renamed(key, "lr_schedule", None, of.schedule)
    yield optim.taken("lr_decay_steps", None, of.decay_steps)
    yield optim.changed("lr_wsd_decay_steps", "lr_stable_steps", "steps from warm-up to decay", of.stable_steps, None)
    yield optim.changed("min_lr", "lr_min_ratio", "as a share of lr", of.min_lr, None)
    yield optim.renamed("min_lr_ratio", "lr_min_ratio", 0.0, of.min_ratio)
    yield optim.renamed("min_lr_factor", "lr_min_ratio", None, of.min_ratio)
    yield from optim.all_taken(weight_decay=0.01, betas=[0.9, 0.999])
    yield optim.renamed("clip_grad", "grad_clip", 1.0)
    yield trained.taken("grad_clip", 1.0, of.grad_clip, note="only FSDP's workers up to verl 0.7 read it")
    yield optim.taken("eps", None)
    yield optim.unsupported("optimizer", "AdamW", "AdamW", "adamw", "adam", default="AdamW")
    yield optim.unsupported("name", "AdamW", "AdamW")
    yield optim.unsupported("optimizer_impl", "torch.optim's AdamW", "torch.optim", default="torch.optim")
    yield optim.not_needed(
        "override_optimizer_config.{optimizer_cpu_offload,optimizer_offload_fraction,"
        "overlap_cpu_optimizer_d2h_h2d,use_precision_aware_optimizer,use_torch_optimizer_for_cpu_offload}",
        SPEED,
    )
    yield optim.unsupported("override_optimizer_config{,.**}", "betas, eps and weight_decay are keys of their own")
    yield optim.unsupported("num_cycles", "half a cosine", 0.5, default=0.5)
    yield optim.unsupported("zero_indexed_step", "the decay begins at lr", True, default=True)
    megatrons = "{lr_warmup_init,lr_min,lr_start,weight_decay_incr_style}"
    yield optim.unsupported(megatrons, "lr_scheduler_type, lr_warmup_steps, min_lr_ratio", 0.0, "constant")
    yield optim.unsupported("lr_decay_ratio", "the decay is over the whole run", 1.0)
    yield optim.unsupported("{main_grads_dtype,exp_avg_dtype,exp_avg_sq_dtype}", _STATE, "fp32", "float32")
    yield from optim.all_not_needed(_OPTIMIZER)


def _batches(trained: Section, of: _Trained) -> Iterator[Row]:
    """Yields the table rows of one model's batches: mini-batches, micro-batches, epochs, aggregation of the loss.

    In verl the critic inherits most of these values from the actor.
    """
    ours = trained.ours

    def inherited(key: str, value: Any) -> Any:
        """Returns the default of a verl key for this model; for the critic, a reference to the actor's value."""
        return f"${{{ACTOR}.{key}}}" if ours == "critic" else value

    mini_batch = "ppo_mini_batch_size"
    convert = none_if_same_as(f"{ACTOR}.{mini_batch}") if ours == "critic" else None
    yield trained.taken(mini_batch, inherited(mini_batch, 256), convert, note="counts prompts, as in verl")
    yield trained.taken("ppo_micro_batch_size_per_gpu", None, of.micro_batch)
    yield trained.slower("ppo_micro_batch_size", f"{ours}.ppo_micro_batch_size_per_gpu; else batches are cut by tokens")
    dynamic = f"always dynamic, unless {ours}.ppo_micro_batch_size_per_gpu is set"
    yield trained.not_needed("use_dynamic_bsz", dynamic, inherited("use_dynamic_bsz", False))
    longest = "at least the longest row, or its part on each rank"
    budget = 16384 if ours == "actor" else 32768
    yield trained.changed("ppo_max_token_len_per_gpu", "ppo_max_token_len_per_gpu", longest, of.token_budget, budget)
    yield from trained.all_taken(ppo_epochs=inherited("ppo_epochs", 1), shuffle=inherited("shuffle", False))
    yield trained.not_needed("data_loader_seed", "run.seed is the only seed")
    yield trained.taken("loss_agg_mode", inherited("loss_agg_mode", "token-mean"), of.aggregation)
    yield trained.taken("loss_scale_factor", None)


def _engine(trained: Section, model: Section, engine: Section, of: _Trained) -> Iterator[Row]:
    """Yields the table rows of one model's training engine: data types, checkpoints, offload, division over ranks.

    `engine` is verl's section of the FSDP engine; older versions of verl have its keys in other places.
    """
    yield model.renamed("enable_gradient_checkpointing", "gradient_checkpointing", True)
    yield engine.changed("dtype", "dtype", COMPUTE, compute_dtype, "bfloat16")
    if engine.verl != f"{trained.verl}.fsdp_config":  # older versions have the engine's keys under critic.model
        yield Section(f"{trained.verl}.model.fsdp_config", trained.ours).changed(
            "dtype", "dtype", COMPUTE, compute_dtype
        )
    checkpoint = Section(f"{trained.verl}.checkpoint")
    always = "model, optimizer and the rest are always saved"
    yield checkpoint.changed("save_contents", "checkpoint.save_hf_model", always, _hf_model, _EVERYTHING)
    yield checkpoint.slower("load_contents", "checkpoints are loaded whole", _EVERYTHING, [*_EVERYTHING, "hf_model"])
    written = "always written in the background, whole or not at all"
    yield checkpoint.not_needed("{contents,async_save,strict,mbridge_config}", written)
    yield from engine_dtypes(trained)
    # Older versions have the engine's keys of the critic under critic.model.
    masters = Section(f"{trained.verl}.{ENGINES}")
    yield engine.checked("model_dtype", MASTERS, of.model_dtype, "fp32")
    yield masters.checked("model_dtype", MASTERS, of.model_dtype)
    yield engine.renamed("mixed_precision.param_dtype", "dtype", None, compute_dtype)
    reduced = "gradients are reduced in fp32"
    yield engine.slower("mixed_precision.{reduce_dtype,buffer_dtype}", reduced, "fp32", "float32")
    yield engine.unsupported("mixed_precision.**", f"{trained.ours}.dtype; {reduced}")
    of_any = Section(masters.verl, trained.ours)
    yield of_any.taken("param_offload")
    yield of_any.taken("optimizer_offload")
    yield of_any.slower("offload_policy", _OFFLOAD_POLICY)
    whole = "-1, all ranks of the group, if it does not divide them"
    yield engine.changed("fsdp_size", "fsdp_size", whole, of.fsdp_size, -1)
    both = Section(f"{{{engine.verl},{trained.verl}}}", trained.ours)
    yield trained.unsupported("qat.enable", "no quantization in training")
    part = "the part of it that divides the ranks of the group, which --gpus sets"
    yield both.changed("ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size", part, of.sequence_size, 1)
    yield both.changed("strategy", "strategy", "fsdp and fsdp2 are fsdp2", _strategy)
    yield of_any.changed("fsdp_size", "fsdp_size", whole, of.fsdp_size)
    yield of_any.changed("ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size", part, of.sequence_size)
    yield from any_engine(trained.verl)
    yield from rest_of_engines(trained.verl)
    yield trained.not_needed(f"qat.{OF_QAT}", "only with qat.enable")
    yield trained.tree_not_needed("{profiler,profile}.**", "trace.json has every call of a step, for Perfetto")
    always_loaded = "rollout.n; services.progress_timeout_s; weights are always loaded"
    yield trained.not_needed("{rollout_n,nccl_timeout,load_weight}", always_loaded)
    chunks = "{entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,entropy_checkpointing}"
    yield trained.not_needed(chunks, "logits are always computed in pieces")
    yield trained.not_needed("{pad_to_length,use_remove_padding,use_fused_kernels,use_prefix_grouper}", SPEED)
    compiled = f"it compiles the entropy alone, and only speed depends on it; {trained.ours}.compile compiles layers"
    yield trained.not_needed("use_torch_compile", compiled)


def _model(ours: str, model: Section) -> Iterator[Row]:
    """Yields the table rows of a trained model (`ours`: actor or critic): its adapters, its attributes, its memory."""
    yield from _adapters(model)
    without = "without dropout, which is 0, and attn_implementation, which is the fastest"
    yield model.taken("override_config", {}, _override_config, note=without, is_section=True)
    yield model.unsupported("hf_config_path", "write it into the model folder's config.json")
    yield model.unsupported("external_lib", "only models of transformers", default=None)
    yield model.unsupported("mtp.{enable,enable_train,enable_rollout}", "no multi-token prediction")
    yield model.not_needed(f"mtp.{{{OF_MTP}}}", "only with multi-token prediction")
    yield model.not_needed("trust_remote_code", "a model that brings its own code is refused when it is loaded")
    activations = f"{ours}.gradient_checkpointing, lower {ours}.ppo_max_token_len_per_gpu"
    yield model.slower("{enable_activation_offload,tiled_mlp.enabled}", activations)
    ways = "activations_checkpoint_method,activations_checkpoint_granularity,activations_checkpoint_num_layers"
    yield model.not_needed(f"gradient_checkpointing_kwargs.{{{ways}}}", SPEED)
    options = "fused_kernel_options.impl_backend,tiled_mlp.num_shards"
    yield model.not_needed(f"{{use_shm,use_remove_padding,use_liger,use_fused_kernels,{options}}}", SPEED)


def _adapters(model: Section) -> Iterator[Row]:
    """Yields the table rows of a model's LoRA adapters: verl's own keys and, under `lora.`, those of Megatron.

    Keys beside the rank are converted only if the rank of the same engine is above 0.
    """
    has_lora = only_if(lambda _, run: rank_of_adapters(run, model.verl), _LORA)
    of_megatron = only_if(lambda _, run: run.value(f"{model.verl}.lora.rank"), _LORA)

    def layers(condition: Convert) -> Convert:
        return lambda value, run: _layers(condition(value, run)) or None

    yield model.taken("lora_rank", 0)
    yield model.taken("lora_alpha", 16, has_lora)
    yield from model.all_taken(layers(has_lora), target_modules="all-linear", exclude_modules=None)
    like_it = "lora_rank, lora_alpha and target_modules must be those of the adapter, which verl reads there"
    yield model.changed("lora_adapter_path", "lora_adapter_path", like_it)
    yield model.renamed("lora.rank", "lora_rank", 0, of_megatron)
    yield model.renamed("lora.alpha", "lora_alpha", 32, of_megatron)
    names = "Megatron's names of layers become those of Hugging Face models"
    yield model.changed("lora.target_modules", "target_modules", names, layers(of_megatron), [*_LINEAR])
    yield model.changed("lora.exclude_modules", "exclude_modules", names, layers(of_megatron), [])
    yield model.unsupported("lora.adapter_path", "lora_adapter_path: a folder in peft's format")
    yield model.unsupported("lora.type", "plain LoRA", "lora")
    yield model.unsupported("lora.dropout", "all dropout is 0", 0, 0.0)
    yield model.unsupported("target_parameters", "adapters are on linear layers: experts stay frozen")
    yield model.unsupported("lora.dtype", "adapters are fp32", "fp32", "float32")
    yield model.unsupported("lora.freeze_language_model", "only adapters are trained", True)
    yield model.unsupported("lora.lora_B_init_method", "B is 0 at first", "zero")
    yield model.not_needed("lora.lora_A_init_method", "A is Kaiming-uniform at first")
    yield model.not_needed("lora.{dropout_position,a2a_experimental,fully_sharded_loras}", SPEED)
    yield model.not_needed("lora.merge", "adapters are merged for rollouts")
    towers = "actor.freeze_vision_tower: adapters of a vision tower learn only if it is false"
    yield model.not_needed("lora.{freeze_vision_model,freeze_vision_projection}", towers)
