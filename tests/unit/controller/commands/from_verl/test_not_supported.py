"""Keys that a translation refuses, and keys that it leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.commands.from_verl.keys import row_of
from tests.support.verl_launch import ACTOR, ROLLOUT, finding, translated

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("+data.image_keys=[images]", "one column of images"),
        ("+data.video_key=clips", "texts and images only"),
        ("+data.audio_key=sounds", "texts and images only"),
        ("+data.mm_processor_kwargs.do_resize=False", "min_pixels and max_pixels alone"),
        ("algorithm.use_pf_ppo=True", "once per epoch"),
        ("data.gen_batch_size=1024", "a divisor of data.train_batch_size"),
        (f"+{ROLLOUT}.repetition_penalty=1.1", "the trainer's log-probs know no other change"),
        (f"+{ROLLOUT}.min_p=0.05", "the trainer's log-probs know no other change"),
        ("algorithm.adv_estimator=optimal_token_baseline", "grpo"),
        (f"{ACTOR}.policy_loss.loss_mode=cppo", "vanilla"),
        (f"{ACTOR}.optim.optimizer=AdamW8bit", "AdamW"),
        (f"+{ACTOR}.optim.lr_decay_style=inverse-square-root", "constant, cosine or linear"),
        ("actor_rollout_ref.model.lora.type=dora", "plain LoRA"),
        ("actor_rollout_ref.model.lora.dropout=0.1", "dropout is 0"),
        ("actor_rollout_ref.model.target_parameters=[experts]", "experts stay frozen"),
        ("critic.model.lora.adapter_path=/x", "peft's format"),
        (f"{ROLLOUT}.multi_turn.enable=True", "rollout.multi_turn.environments"),
        (f"+{ROLLOUT}.multi_turn.interaction_config_path=talk.yaml", "rollout.multi_turn.environments"),
        ("+data.tool_config_path=tools.yaml", "actor_rollout_ref.rollout.multi_turn.tool_config_path"),
        (f"{ROLLOUT}.agent.default_agent_loop=my_agent", "rollout.multi_turn.environments"),
        (f"{ROLLOUT}.agent.default_agent_loop=tool_agent", "rollout.multi_turn.environments"),
        (f"{ROLLOUT}.agent.agent_loop_config_path=loops.yaml", "rollout.multi_turn.environments"),
        (f"{ROLLOUT}.do_sample=False", "sampled"),
        ("data.reward_fn_key=source", "data_source"),
        ("actor_rollout_ref.model.override_config={attention_dropout: 0.1}", "dropout is 0"),
        ("actor_rollout_ref.model.override_config={moe_config: {freeze_moe_router: True}}", "moe_config"),
        ("+rollout.nnodes=1", "only with actor_rollout_ref.hybrid_engine=False"),
        ("rollout.total_rollout_steps=51200", "trainer.total_training_steps"),
        ("async_training.staleness_threshold=0.5", "never a matter of time"),
        ("async_training.staleness_threshold=0", "never a matter of time"),
        ("async_training.partial_rollout=True", "one version of the weights"),
        ("async_training.trigger_parameter_sync_step=4", "of every step"),
        ("async_training.require_batches=1", "data.train_batch_size"),
        ("async_training.use_rollout_log_probs=True", "never a matter of time"),
        ("+data.no_such_key=1", "mistyped, of a fork"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8", "rollout.vllm"),
        ("data.train_files=hdfs://a/b.parquet", "copy"),
        ("trainer.v1.trainer_mode=separate_async", "one_step_off_policy"),
        ("algorithm.rollout_is_threshold=2.0", "algorithm.rollout_correction: rollout_is is the level"),
        ("algorithm.rollout_correction.rollout_is_threshold=-1", "at least 1"),
        ("algorithm.rollout_correction.rollout_token_veto_threshold=2.0", "rollout_rs: seq_max_k1"),
        ("data.train_batch_sise=4", "did you mean data.train_batch_size?"),
    ],
)
def test_what_changes_results_and_is_not_supported_must_be_decided(tmp_path: Path, override: str, instead: str) -> None:
    correction = ("algorithm.rollout_correction.rollout_is=token",) if "is_threshold" in override else ()
    key = override.partition("=")[0].lstrip("+")
    (stopping,) = translated(tmp_path, *correction, override).stopping
    assert stopping.key == key
    assert stopping.outcome == ("to be decided" if row_of(key) else "unknown")
    assert instead in stopping.note
    assert translated(tmp_path, *correction, override, drop=(key,)).stopping == []


@pytest.mark.parametrize(
    "override",
    [
        f"{ACTOR}.fsdp_config.offload_policy=True",
        "critic.model.fsdp_config.offload_policy=True",
        "trainer.default_hdfs_dir=hdfs://x",
        f"{ACTOR}.strategy=megatron",
        f"{ROLLOUT}.nnodes=1",
        "async_training.use_trainer_do_validate=True",
    ],
)
def test_what_changes_no_result_is_only_said(tmp_path: Path, override: str) -> None:
    translation = translated(tmp_path, override)
    assert finding(translation, override.partition("=")[0]).outcome == "not supported"
    assert translation.stopping == []


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("algorithm.use_pf_ppo=False", "off"),
        ("async_training.partial_rollout=False", "off"),
        ("async_training.trigger_parameter_sync_step=1", "off"),
        ("async_training.dynamic_schedule_policy=default", "speed only"),
        ("rollout.n=4", "actor_rollout_ref.rollout.n"),
        ("actor_rollout_ref.hybrid_engine=True", "rollouts are sampled on the actor's GPUs"),
        (f"+{ACTOR}.use_rollout_log_probs=True", "algorithm.rollout_correction.bypass_mode"),
        (f"{ROLLOUT}.checkpoint_engine.backend=nccl", "weights come from the same process, or as files"),
        ("+data.no_such_key=null", "off"),
        ("data.continuous_token.enable=True", "what was sampled is never encoded anew"),
        ("algorithm.filter_groups.max_inflight_gen_batches=1", "off"),
        ("reward_model.micro_batch_size=null", "speed and memory only"),
        ("reward_model.megatron.tensor_model_parallel_size=4", "FSDP2 over the ranks of a group"),
        ("reward_model.use_reward_loop=True", "functions are chosen by data_source"),
        ("reward_manager.name=naive", "functions are chosen by data_source"),
        ("actor_rollout_ref.profiler.discrete=True", "trace.json has every call of a step, for Perfetto"),
        ("trainer.profile_steps=[1]", "trace.json has every call of a step, for Perfetto"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL", "speed and memory only"),
        (f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True", "speed and memory only"),
        ("algorithm.filter_groups.metric=acc", "only with filter_groups.enable"),
        ("+algorithm.rollout_is_level=token", "only with algorithm.rollout_is_threshold"),
        (f"{ACTOR}.fsdp_config.offload_policy=False", "off"),
        (f"{ACTOR}.megatron.grad_offload=True", "FSDP2 decides how weights move"),
        ("actor_rollout_ref.model.lora_alpha=32", "only with LoRA"),
        ("actor_rollout_ref.model.lora.alpha=64", "only with LoRA"),
        (f"{ROLLOUT}.layered_summon=True", "weights come from the same process, or as files"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.max_loras=1", "adapters are merged into the weights that vLLM gets"),
        ("data.gen_batch_size=512", "same value as data.train_batch_size"),
        ("data.gen_batch_size=64", "only how many prompts verl reads at a time"),
        (f"+{ROLLOUT}.repetition_penalty=1.0", "off"),
        ("+reward_model.reward_kwargs.max_resp_len=512", "same value as data.max_response_length"),
        ("ray_kwargs.ray_init.num_cpus=8", "no Ray"),
        (f"{ROLLOUT}.multi_turn.enable=False", "off"),
        (f"{ROLLOUT}.multi_turn.tool_config_path=null", "off"),
        (f"{ROLLOUT}.multi_turn.max_assistant_turns=4", "only with multi_turn.enable"),
        (f"{ROLLOUT}.multi_turn.tool_response_truncate_side=middle", "off"),
        (f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode=strict", "what was sampled is never encoded anew"),
        (f"+{ROLLOUT}.multi_turn.enable_tokenization_sanity_check=True", "what was sampled is never encoded anew"),
        (f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent", "off"),
        (f"{ROLLOUT}.agent.num_workers=16", "the ranks that have the engine sample"),
        ("data.return_raw_chat=True", "rows keep their messages and columns"),
        (f"{ROLLOUT}.prompt_length=512", "same value as data.max_prompt_length"),
    ],
)
def test_what_is_not_needed_says_why(tmp_path: Path, override: str, why: str) -> None:
    found = finding(translated(tmp_path, override), override.partition("=")[0].lstrip("+"))
    assert found.outcome == "not needed"
    assert found.note.startswith(why)


@pytest.mark.parametrize("rank", ["lora_rank", "lora.rank"])
def test_beside_adapters_frozen_weights_need_no_fp32_and_no_reference(tmp_path: Path, rank: str) -> None:
    bf16, offload = f"{ACTOR}.fsdp_config.model_dtype", "actor_rollout_ref.ref.fsdp_config.param_offload"
    lora = f"actor_rollout_ref.model.{rank}=8"
    translation = translated(tmp_path, lora, f"{bf16}=bfloat16", f"{offload}=True")
    assert translation.stopping == []
    assert finding(translation, bf16).note == "trained weights are fp32, frozen ones have the dtype of the computation"
    assert finding(translation, offload).note == "with LoRA the reference is the policy without its adapters"
