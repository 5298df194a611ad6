"""Keys of verl's training engines: what changes learning is refused for every engine, and no wildcard hides a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.commands.from_verl.keys import ROWS
from controller.commands.from_verl.row import Section
from tests.support.verl_launch import ACTOR, ROLLOUT, config_of, finding, translated

pytestmark = pytest.mark.slow

MEGATRON = f"{ACTOR}.megatron"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"

# What is not needed as a whole tree: logs, profiles, Ray and its transport, and names of classes.
TREES = {
    *("**_target_", "hydra.**", "transfer_queue.**", "{ray_kwargs,ray_init}.**"),
    "{global_profiler,profiler,actor_rollout_ref.profiler,trainer.npu_profile}{,.**}",
    "trainer.{profile_steps,controller_nsight_options.**,worker_nsight_options.**}",
    *(f"{model}.{{profiler,profile}}.**" for model in (ACTOR, "actor_rollout_ref.ref", "critic")),
    f"{ROLLOUT}.{{disaggregation,prometheus,trace,profiler}}{{,.**}}",
    "{reward.reward_model,reward_model}.rollout.{disaggregation,prometheus,trace,profiler}{,.**}",
    "reward_model.{profiler,model.profiler}.**",
}


def test_no_wildcard_is_not_needed_beside_trees_without_numbers() -> None:
    named_by_users = "distillation.teacher_models.*."
    trees = {row.key for row in ROWS if row.outcome == "not needed" and "*" in row.key.replace(named_by_users, "")}
    assert trees == TREES


def test_a_wildcard_gives_no_reason() -> None:
    with pytest.raises(ValueError, match=r"a\.b_\*: expected the names of keys"):
        Section("a").not_needed("b_*", "speed only")


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        (f"{MEGATRON}.dtype=float16", "float16 needs a scale of the loss"),
        (f"{ACTOR}.fsdp_config.dtype=float16", "float16 needs a scale of the loss"),
        ("critic.megatron.dtype=float16", "float16 needs a scale of the loss"),
        (f"{ACTOR}.torchtitan.dtype=fp16", "float16 needs a scale of the loss"),
        (f"+{TRANSFORMER}.moe_aux_loss_coeff=0.001", "no loss and no bias"),
        (f"+{TRANSFORMER}.moe_z_loss_coeff=0.001", "no loss and no bias"),
        (f"+{TRANSFORMER}.moe_router_load_balancing_type=aux_loss", "no loss and no bias"),
        (f"+{TRANSFORMER}.moe_router_bias_update_rate=0.001", "no loss and no bias"),
        (f"+{TRANSFORMER}.fp8=e4m3", "fp8"),
        (f"+{TRANSFORMER}.hidden_dropout=0.1", "config.json"),
        (f"+{ACTOR}.mindspeed.mcore_kwargs.moe_aux_loss_coeff=0.001", "no loss and no bias"),
        (f"{ACTOR}.veomni.router_replay.mode=R2", "no replay of expert routing"),
        (f"{MEGATRON}.router_replay.mode=R3", "no replay of expert routing"),
        (f"{ACTOR}.router_replay.mode=R2", "no replay of expert routing"),
        ("actor_rollout_ref.ref.router_replay.mode=R2", "no replay of expert routing"),
        (f"{MEGATRON}.qat.enable=True", "no quantization"),
        (f"{ACTOR}.veomni.load_checkpoint_path=/weights", "model's folder"),
        ("actor_rollout_ref.ref.fsdp_config.dtype=float32", "the actor's dtype"),
        ("actor_rollout_ref.model.lora.dtype=float16", "adapters are fp32"),
        (f"{ACTOR}.optim.exp_avg_dtype=bf16", "optimizer_state_dtype"),
        # What a later version of verl may add.
        (f"{MEGATRON}.sharpness_penalty=0.1", "can change what is learned"),
        (f"{ACTOR}.fsdp_config.sharpness_penalty=0.1", "can change what is learned"),
        ("critic.veomni.sharpness_penalty=0.1", "can change what is learned"),
        ("actor_rollout_ref.ref.torchtitan.temperature=0.5", "can change what is learned"),
        ("reward_model.megatron.pooling=mean", "can change what is learned"),
        (f"{ACTOR}.checkpoint.average_weights=5", ""),
        ("actor_rollout_ref.ref.ema_decay=0.99", "fork"),
        (f"{ROLLOUT}.checkpoint_engine.quantize=fp8", "weights reach the engine as they are"),
        (f"{ROLLOUT}.agent.max_context=3", "fork"),
        ("trainer.v1.sampler.priority=recent", "fork"),
        ("reward.reward_model.rollout.logit_bias=1", "fork"),
        (f"{ACTOR}.optim.muon_weight_norm=1", ""),
    ],
)
def test_what_an_engine_learns_beside_the_loss_must_be_decided(tmp_path: Path, override: str, instead: str) -> None:
    key = override.partition("=")[0].lstrip("+")
    (stopping,) = translated(tmp_path, "critic.optim.lr=1e-5", override).stopping
    assert stopping.key == key
    assert instead in stopping.note


@pytest.mark.parametrize(
    "override",
    [
        f"{MEGATRON}.use_mbridge=True",
        f"{MEGATRON}.router_replay.mode=disabled",
        f"+{TRANSFORMER}.moe_aux_loss_coeff=0.0",
        f"+{TRANSFORMER}.moe_router_load_balancing_type=none",
        f"+{TRANSFORMER}.recompute_granularity=full",
        f"+{TRANSFORMER}.apply_rope_fusion=True",
        f"{ACTOR}.veomni.moe_implementation=fused",
        f"{ACTOR}.fsdp_config.forward_prefetch=True",
        "actor_rollout_ref.ref.fsdp_config.model_dtype=bf16",
        "actor_rollout_ref.ref.fsdp_config.dtype=bf16",
    ],
)
def test_what_an_engine_does_faster_is_not_needed(tmp_path: Path, override: str) -> None:
    found = finding(translated(tmp_path, override), override.partition("=")[0].lstrip("+"))
    assert found.outcome == "not needed"
    assert found.note


def test_the_dtype_of_every_engine_is_taken(tmp_path: Path) -> None:
    assert config_of(tmp_path, f"{MEGATRON}.dtype=float32").actor.dtype == "fp32"
    assert config_of(tmp_path, f"{MEGATRON}.dtype=bfloat16").actor.dtype == "bf16"


@pytest.mark.parametrize(
    "override",
    [
        *(f"{ACTOR}.fsdp_config.model_dtype={dtype}" for dtype in ("bf16", "bfloat16", "fp16", "float16")),
        f"{ACTOR}.veomni.mixed_precision=False",
    ],
)
def test_shorter_master_weights_become_fp32_and_the_report_says_so(tmp_path: Path, override: str) -> None:
    translation = translated(tmp_path, override)
    found = finding(translation, override.partition("=")[0])
    assert translation.stopping == []
    assert found.outcome == "changed"
    assert "master weights are fp32 here" in found.note


def test_the_settings_of_the_reference_may_be_the_actors(tmp_path: Path) -> None:
    same = "actor_rollout_ref.ref.megatron.override_transformer_config=${" + TRANSFORMER + "}"
    assert translated(tmp_path, f"+{TRANSFORMER}.apply_rope_fusion=True", same).stopping == []
