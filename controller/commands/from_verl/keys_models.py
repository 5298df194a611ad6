"""Converts verl's keys of policy, value model and reference model into keys of SplitPPO.

verl has these keys in its sections `actor_rollout_ref.{actor,model,ref}` and `critic`.
"""

from collections.abc import Iterator
from typing import Any, get_args

from controller.commands.from_verl.keys_engines import ENGINES, NO_REPLAY, any_engine, compute_dtype, rest_of_engines
from controller.commands.from_verl.keys_trained import ACTOR, rank_of_adapters, trained
from controller.commands.from_verl.row import (
    Convert,
    NotNeeded,
    NotSupported,
    Row,
    Section,
    if_rewarded,
    none_if_same_as,
    one_of,
    only_if,
)
from controller.commands.from_verl.run import VerlRun
from splitppo.config.section import KlEstimator
from splitppo.config.subsections.policy_loss import LOSS_MODES, PolicyLossConfig

_MODEL = "actor_rollout_ref.model"
_OF_OPTIMIZERS = (
    "{name,optimizer,lr,lr_warmup_steps,lr_warmup_steps_ratio,total_training_steps,weight_decay,betas,eps,clip_grad,"
    "decay_type,min_lr_factor}"
)
_LOSSES = f"losses here: {', '.join(LOSS_MODES)}"
_IF_VALUES = "there is a critic if the estimator needs values"
_MICRO_BATCHES = "forward passes use the micro-batches of {}.ppo_*_per_gpu"
_OF_CORRECTION = (
    "{rollout_is,rollout_is_threshold,rollout_is_batch_normalize,rollout_rs,rollout_rs_threshold,"
    "rollout_rs_threshold_lower,rollout_token_veto_threshold,bypass_mode,use_policy_gradient,loss_type}"
)
_LOG_PROB_BATCHES = (
    "{log_prob_micro_batch_size,log_prob_micro_batch_size_per_gpu,log_prob_use_dynamic_bsz,"
    "log_prob_max_token_len_per_gpu}"
)
_OF_SINGLE_LOSSES = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")


def _loss_mode(value: Any, run: VerlRun) -> Any:
    """Keeps the name of the policy loss; NotSupported if it is unknown, or verl ignores it with bypass_mode."""
    if value != "vanilla" and run.value("algorithm.rollout_correction.bypass_mode"):
        raise NotSupported(
            "with bypass_mode verl ignores it, and loss_type chooses PPO's clip or REINFORCE: set loss_mode=vanilla"
        )
    own = "a loss of your own: actor.policy_loss.custom_path"
    return one_of(LOSS_MODES, f"{_LOSSES}; {own}")(value, run)


def _actor(actor: Section, model: Section, losses: Section) -> Iterator[Row]:
    """Yields the table rows of the policy: model, clipping, policy loss, entropy, KL, then all that is trained alike.

    `actor`, `model` and `losses` are verl's sections actor, model and actor.policy_loss.
    """
    yield model.renamed("path", "actor.model", "~/models/deepseek-llm-7b-chat")
    yield model.changed("tokenizer_path", "data.tokenizer", "the policy's tokenizer", default=None)
    yield model.unsupported("custom_chat_template", "write it to a file, and set data.chat_template to this file")
    yield actor.taken("clip_ratio", 0.2)
    unless_given = "verl's default is 0.2, whatever clip_ratio is"
    for key in ("clip_ratio_low", "clip_ratio_high"):
        yield actor.changed(key, key, unless_given, none_if_same_as(f"{ACTOR}.clip_ratio"), 0.2)
    yield actor.taken("clip_ratio_c", 3.0)
    yield losses.taken("loss_mode", "vanilla", _loss_mode)
    for key in _OF_SINGLE_LOSSES:
        yield losses.taken(key, PolicyLossConfig.model_fields[key].default)
    for key in ("tau_pos", "tau_neg"):
        yield actor.renamed(key, f"policy_loss.{key}", PolicyLossConfig.model_fields[key].default)
        yield losses.taken(key, None)
    yield losses.not_needed(f"rollout_correction.{_OF_CORRECTION}", "algorithm.rollout_correction sets it")
    yield losses.unsupported("*", _LOSSES)
    yield actor.unsupported("tis_imp_ratio_cap", "rollout_is: token in algorithm.rollout_correction", -1)
    yield actor.taken("entropy_coeff", 0, if_rewarded())
    entropy = Section(ACTOR, "algorithm.adaptive_entropy")
    fork = "of Skywork-OR1's fork of verl"
    yield entropy.renamed("use_adaptive_entropy_adjustment", "enable", convert=if_rewarded(), note=fork)
    for key in ("target_entropy", "entropy_coeff_delta", "min_entropy_coeff", "max_entropy_coeff"):
        yield entropy.taken(key, note=fork)
    yield actor.not_needed("use_rollout_log_probs", "algorithm.rollout_correction.bypass_mode")
    measured = "{calculate_entropy,calculate_sum_pi_squared,sum_pi_squared_checkpointing}"
    yield actor.not_needed(measured, "actor/entropy is always measured")
    yield actor.taken("use_kl_loss", False, if_rewarded())
    yield actor.taken("kl_loss_coef", 0.001)
    yield actor.taken("kl_loss_type", "low_var_kl", one_of(get_args(KlEstimator)))
    yield actor.unsupported("router_replay.mode", NO_REPLAY, "disabled")
    yield actor.not_needed("router_replay.{record_file,replay_file}", "only with router_replay.mode")
    yield actor.taken("freeze_vision_tower", False)
    yield from trained(actor, model=_MODEL, engine=f"{ACTOR}.fsdp_config")


def _reference(reference: Section) -> Iterator[Row]:
    """Yields the table rows of the reference model; almost none is needed, as it is computed like the actor."""
    yield reference.not_needed("model.override_config.attn_implementation", "always the fastest")
    yield reference.unsupported("model{,.**}", "the reference is the model that the policy starts from")
    yield reference.not_needed(_LOG_PROB_BATCHES, _MICRO_BATCHES.format("actor"))
    offloaded = "placement.reference_param_offload"
    lora = "with LoRA the reference is the policy without its adapters"
    of_own = only_if(lambda _, run: not rank_of_adapters(run, _MODEL), lora)
    engine = Section(f"{reference.verl}.{ENGINES}")
    yield engine.renamed("param_offload", offloaded, convert=of_own)
    alike = "the reference has the actor's dtype"
    yield engine.checked("dtype", "not needed if it is the actor's, else not supported", _same_dtype(alike))
    yield engine.checked("mixed_precision.param_dtype", "as dtype", _same_dtype(alike))
    yield engine.not_needed("mixed_precision.{reduce_dtype,buffer_dtype}", "the reference has no gradients")
    yield engine.not_needed("{model_dtype,mixed_precision}", "the reference is computed in the actor's dtype")
    placed = "the reference is sharded over its group (placement.reference)"
    yield engine.not_needed("{optimizer_offload,offload_policy,fsdp_size,ulysses_sequence_parallel_size}", placed)
    yield from any_engine(reference.verl)
    yield from rest_of_engines(reference.verl)
    yield reference.not_needed(
        "{strategy,ulysses_sequence_parallel_size,param_offload,load_weight,rollout_n,nccl_timeout,use_torch_compile,"
        "use_remove_padding,use_fused_kernels,pad_to_length,use_prefix_grouper,entropy_checkpointing,"
        "entropy_from_logits_with_chunking,entropy_from_logits_chunk_size}",
        "the reference is computed like the actor, in the group of placement.reference",
    )
    yield reference.not_needed(f"optim.{_OF_OPTIMIZERS}", "the reference is not trained")
    yield reference.unsupported("router_replay.mode", NO_REPLAY, "disabled")
    yield reference.not_needed("router_replay.{record_file,replay_file}", "only with router_replay.mode")
    yield reference.tree_not_needed("{profiler,profile}.**", "trace.json has every call of a step, for Perfetto")


def _critic(critic: Section) -> Iterator[Row]:
    """Yields the table rows of the value model: what it alone has, then all that is trained alike."""
    yield critic.renamed("model.path", "model", convert=none_if_same_as(f"{_MODEL}.path"))
    yield critic.not_needed("model.{tokenizer_path,custom_chat_template}", "those of the policy")
    yield critic.checked("enable", _IF_VALUES, _critic_enable)
    yield critic.taken("cliprange_value", 0.5)
    forward = "{forward_max_token_len_per_gpu,forward_micro_batch_size,forward_micro_batch_size_per_gpu}"
    yield critic.not_needed(forward, _MICRO_BATCHES.format("critic"))
    yield critic.not_needed("kl_ctrl.{type,kl_coef}", "verl does not read it")
    yield from trained(critic, model="critic.model", engine="critic.fsdp")


def _same_dtype(instead: str) -> Convert:
    """Makes a conversion that raises NotNeeded if the actor's computation has the same dtype, else NotSupported."""
    keys = [f"{ACTOR}.{engine}.dtype" for engine in ("fsdp_config", "megatron", "torchtitan", "automodel")]

    def convert(value: Any, run: VerlRun) -> Any:
        actors = next((run.value(key) for key in keys if key in run.settings.given), "bfloat16")
        if compute_dtype(value, run) == compute_dtype(actors, run):
            raise NotNeeded(instead)
        raise NotSupported(instead)

    return convert


def _critic_enable(value: Any, run: VerlRun) -> Any:
    if value is None or value or not run.uses_critic:
        raise NotNeeded(_IF_VALUES)
    raise NotSupported("choose an algorithm.adv_estimator other than gae")


MODEL_ROWS: tuple[Row, ...] = (
    *_actor(Section(ACTOR, "actor"), Section(_MODEL), Section(f"{ACTOR}.policy_loss", "actor.policy_loss")),
    *_reference(Section("actor_rollout_ref.ref")),
    *_critic(Section("critic", "critic")),
)
