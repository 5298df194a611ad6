"""Converts the keys of verl's training engines (FSDP, Megatron, VeOmni, Torchtitan, ...): FSDP2 replaces them all.

An engine has keys that change what is learned, such as auxiliary losses, beside many that do not. Therefore each key
that needs no counterpart is named here, with the reason; every other key of an engine is refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from controller.commands.from_verl.row import NotNeeded, Row, Section, mapped, same_as
from controller.commands.from_verl.run import VerlRun

ENGINES = "{fsdp_config,fsdp,model.fsdp_config,megatron,veomni,torchtitan,automodel,mindspeed,engine}"
COMPUTE = "of the computation; master weights are fp32"
NO_REPLAY = "no replay of expert routing; set algorithm.rollout_correction.rollout_is"
SPEED = "speed and memory only"
MASTERS = "master weights are fp32 here: updates that the shorter type rounds away count, and weights take more memory"
_ACTOR = "actor_rollout_ref.actor"
_FLOAT16 = "bf16 or fp32: float16 needs a scale of the loss, which is not here; fp32 is more exact, and slower"
_OF_THE_ENGINE = "an engine's key that can change what is learned: FSDP2 has none of this name"
_ROUTERS = "no loss and no bias beside the policy's: experts are chosen by the router as the model has it"
_SHORT_TYPES = ("bf16", "bfloat16", "fp16", "float16")

# Converts the dtype of forward and backward passes.
compute_dtype = mapped({"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}, _FLOAT16)

_PARTS = "FSDP2 over the ranks of a group divides models, batches and rows"
_WAYS = "FSDP2 decides how weights move and when: the numbers are the same"
_KERNELS = "another kernel, or another order, for the same formula"
_PADDING = "rows are packed without padding"
_PIECES = "logits are always computed in pieces"
_WEIGHTS = "weights are read from the model's folder"
# verl's names of settings of multi-token prediction and of quantization-aware training, beside those that enable them.
OF_MTP = (
    "detach_encoder,mtp_loss_scaling_factor,method,num_speculative_tokens,speculative_algorithm,speculative_eagle_topk,"
    "speculative_num_draft_tokens,speculative_num_steps"
)
OF_QAT = "{mode,group_size,ignore_patterns,activation_observer,quantization_config_path}"
_SEED = "run.seed determines a run"
_OF_ONE_RANK = "each rank holds its part of the weights"
_MODEL_TYPE = "config.json of the model says it: with another architecture its weights would not fit"

# verl's names below the section of an engine that need no key, by reason.
_NAMES: Mapping[str, str] = {
    _PARTS: """tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
        context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel
        num_layers_per_virtual_pipeline_stage dynamic_context_parallel max_seqlen_per_dp_cp_rank tensor_parallel_size
        pipeline_parallel_size expert_parallel_size data_parallel_size data_parallel_shard_size
        data_parallel_replicate_size strategy tp pp cp ep etp vpp ulysses_parallel_size enable_full_shard
        spmd_backend""",
    _WAYS: """grad_offload use_distributed_optimizer use_megatron_fsdp reshard_after_forward forward_prefetch
        use_orig_params wrap_policy.min_num_params wrap_policy.transformer_layer_cls_to_wrap min_num_params
        activation_gpu_limit
        basic_modules init_device enable_fsdp_offload impl_cfg.optimizer forward_only
        override_ddp_config.grad_reduce_in_fp32 override_ddp_config.overlap_grad_reduce
        override_ddp_config.overlap_param_gather override_ddp_config.use_distributed_optimizer""",
    _KERNELS: """use_torch_compile activation_checkpoint enable_reentrant impl_cfg.recompute attn_implementation
        attn_type attention_backend_override causal_conv1d_implementation chunk_gated_delta_rule_implementation
        cross_entropy_loss_implementation dsa_attention_implementation dsa_indexer_implementation
        load_balancing_loss_implementation mhc_implementation moe_implementation rms_norm_gated_implementation
        rms_norm_implementation rotary_pos_emb_implementation swiglu_mlp_implementation force_use_huggingface
        use_fused_kernels""",
    _PADDING: """use_remove_padding pad_to_length pad_to_length_bucket pad_bshd_to_minibatch_max max_seq_len
        impl_cfg.use_thd""",
    _PIECES: "entropy_checkpointing entropy_from_logits_chunk_size entropy_from_logits_with_chunking",
    _WEIGHTS: """use_dist_checkpointing dist_checkpointing_path dist_checkpointing_prefix use_mbridge
        vanilla_mbridge""",
    "checkpoint.* decides how checkpoints are written": """dist_ckpt_optim_fully_reshardable
        distrib_optim_fully_reshardable_mem_efficient ckpt_manager""",
    _SEED: "seed full_determinism",
    "only with qat.enable": """qat.mode qat.group_size qat.ignore_patterns qat.activation_observer
        qat.quantization_config_path""",
    "only with router_replay.mode": "router_replay.record_file router_replay.replay_file",
    "a metric of the load of experts": "moe_load_balance_monitor_interval",
}
# Megatron's names of a transformer's settings that need no key, by reason.
_TRANSFORMER: Mapping[str, str] = {
    _PARTS: """tensor_model_parallel_size context_parallel_size context_parallel_algo sequence_parallel
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage pipeline_num_transformer_layers deallocate_pipeline_outputs
        use_distributed_optimizer overlap_grad_reduce overlap_param_gather swap_optimizer""",
    _KERNELS: """attention_backend use_flash_attn apply_rope_fusion bias_activation_fusion bias_dropout_fusion
        masked_softmax_fusion gradient_accumulation_fusion persist_layer_norm use_fused_rmsnorm use_fused_swiglu
        use_fused_rotary_pos_emb use_naive_l2norm moe_enable_deepep moe_grouped_gemm moe_permute_fusion
        moe_shared_expert_overlap moe_token_dispatcher_type moe_permutation_async_comm""",
    "the router's rounding: it is computed as the model's code in transformers computes it": "moe_router_dtype",
    "actor.gradient_checkpointing": """recompute_granularity recompute_method recompute_modules recompute_num_layers""",
    "batches are cut by tokens": "micro_batch_size seq_length",
    _MODEL_TYPE: """multi_latent_attention multi_head_latent_attention normalization swiglu num_query_groups spec""",
}
# Of a transformer's settings: values that switch off what is not here.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "moe_aux_loss_coeff": (0, 0.0),
    "moe_z_loss_coeff": (0, 0.0),
    "moe_router_bias_update_rate": (0, 0.0),
    "moe_router_enable_expert_bias": (),
    "moe_router_load_balancing_type": ("none",),
}


def any_engine(verl: str) -> Iterator[Row]:
    """Yields the table rows of the keys that need no counterpart, or have none, of all engines below verl's section."""
    engine = Section(f"{verl}.{ENGINES}")
    yield from engine.all_not_needed(_NAMES)
    transformer = Section(f"{engine.verl}.{{override_transformer_config,override_mcore_model_config,mcore_kwargs}}")
    yield from transformer.all_not_needed(_TRANSFORMER)
    for key, off in _OFF.items():
        yield transformer.unsupported(key, _ROUTERS, *off)
    yield transformer.unsupported("fp8", "no training in fp8")
    yield transformer.not_needed("fp8_recipe", "only with fp8")
    in_config = "write it into the model folder's config.json, if transformers has it"
    if verl != _ACTOR:
        for key in ("override_transformer_config", "override_ddp_config"):
            yield engine.checked(key, "not needed if it is the actor's", same_as(f"{_ACTOR}.megatron.{key}", in_config))
    whole = "{override_transformer_config,override_mcore_model_config,mcore_kwargs}"
    yield engine.unsupported(whole, in_config)
    yield transformer.unsupported("**", in_config)
    yield engine.unsupported("router_replay.mode", NO_REPLAY, "disabled")
    yield engine.unsupported("qat.enable", "no quantization in training")
    yield engine.unsupported("override_ddp_config{,.**}", "gradients are reduced in fp32")
    yield engine.unsupported("load_checkpoint_path", f"{_WEIGHTS}: export them into one")


def rest_of_engines(verl: str) -> Iterator[Row]:
    """Yields the last rows of verl's section: they refuse all keys of engines that no row before them has named."""
    yield Section(f"{verl}.{ENGINES}").unsupported("**", _OF_THE_ENGINE)


def engine_dtypes(trained: Section) -> Iterator[Row]:
    """Yields the table rows of the dtypes of engines other than FSDP, for the actor's or the critic's section."""
    engine = Section(f"{trained.verl}.{{megatron,torchtitan,automodel,mindspeed,veomni,engine}}", trained.ours)
    yield engine.changed("dtype", "dtype", COMPUTE, compute_dtype)
    yield Section(f"{trained.verl}.veomni").checked("mixed_precision", MASTERS, _mixed_precision)
    yield Section(f"{trained.verl}.torchtitan").not_needed("mixed_precision", "verl does not read it")


def _mixed_precision(value: Any, _: VerlRun) -> bool:
    """Raises NotNeeded if VeOmni has fp32 master weights, as here; without mixed precision all its numbers are bf16."""
    if value:
        raise NotNeeded("master weights are fp32, the computation is in bf16")
    return True


def is_short_type(dtype: Any) -> bool:
    """Returns True if a dtype of verl is shorter than fp32."""
    return dtype in _SHORT_TYPES
