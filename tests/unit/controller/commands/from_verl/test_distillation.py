"""Translated runs of verl with on-policy distillation: teachers, signals, bounds, GPUs, and what is not translated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.verl_launch import config_of, finding, translated

LOSS = "distillation.distillation_loss"
ON = ("distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=Qwen/Qwen3-32B")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"signal": "loss", "loss_type": "k3", "coef": 1.0, "only": False, "max_abs": None, "log_prob_min": None}),
        ((f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=True"), {"signal": "advantage"}),
        ((f"{LOSS}.loss_mode=k2", f"{LOSS}.loss_max_clamp=5"), {"loss_type": "k2", "max_abs": 5.0}),
        ((f"{LOSS}.loss_mode=forward_kl_topk",), {"signal": "top_k", "top_k_kl": "forward", "top_k": 32}),
        (
            (f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=64", f"{LOSS}.log_prob_min_clamp=-10"),
            {"top_k": 64, "log_prob_min": -10.0},
        ),
        ((f"{LOSS}.log_prob_min_clamp=-10",), {"log_prob_min": None}),  # verl bounds top-k alone
        ((f"{LOSS}.distillation_loss_coef=0.5",), {"coef": 0.5}),
        ((f"{LOSS}.distillation_loss_coef=0.5", f"{LOSS}.use_task_rewards=False"), {"coef": 1.0, "only": True}),
    ],
)
def test_the_signal_is_that_of_verls_loss(
    tmp_path: Path, overrides: tuple[str, ...], expected: dict[str, object]
) -> None:
    teacher = config_of(tmp_path, *ON, *overrides).teacher
    assert teacher.folders == ("Qwen/Qwen3-32B",)
    assert {name: getattr(teacher, name) for name in expected} == expected


def test_without_rewards_there_is_no_critic_and_no_estimator_that_needs_scores(tmp_path: Path) -> None:
    config = config_of(tmp_path, *ON, f"{LOSS}.use_task_rewards=False")
    assert (config.algorithm.adv_estimator, config.roles) == ("reinforce_plus_plus", ("actor",))
    assert (config.actor.dtype, config.teacher.dtype) == ("bf16", "bf16")
    result = translated(tmp_path, *ON, f"{LOSS}.use_task_rewards=False", "algorithm.adv_estimator=grpo")
    assert finding(result, "algorithm.adv_estimator").outcome == "changed"
    assert (config.placement.teacher, config.services.actor.num_processes) == ("actor", 8)


def test_teachers_have_the_gpus_of_their_pool(tmp_path: Path) -> None:
    config = config_of(tmp_path, *ON, "distillation.nnodes=1", "distillation.n_gpus_per_node=4")
    assert (config.placement.teacher, config.services.reward.devices) == ("reward", (8, 9, 10, 11))
    assert config.roles == ("actor", "critic", "reward")


def test_several_teachers_are_chosen_by_data_source(tmp_path: Path) -> None:
    named = {"g": ("openai/gsm8k", "A"), "m": ("math", "B")}
    models = [
        f"+distillation.teacher_models.{name}.{key}={value}"
        for name, values in named.items()
        for key, value in zip(("key", "model_path"), values, strict=True)
    ]
    teacher = config_of(tmp_path, ON[0], *models).teacher
    assert (teacher.model, teacher.models) == ("", {"openai/gsm8k": "A", "math": "B"})


@pytest.mark.parametrize(
    ("override", "more"),
    [
        (f"{LOSS}.loss_mode=k3", f"{LOSS}.use_policy_gradient=True"),
        (f"{LOSS}.use_policy_gradient=True", f"{LOSS}.loss_mode=forward_kl_topk"),
        (f"{LOSS}.loss_mode=jsd", "distillation.nnodes=0"),
        (f"{LOSS}.loss_mode=k1", "distillation.nnodes=0"),
        (f"{LOSS}.policy_loss_mode=gspo", f"{LOSS}.loss_mode=k3"),
        (f"{LOSS}.clip_ratio=0.1", f"{LOSS}.loss_mode=k3"),
        ("distillation.teacher_key=task", "distillation.nnodes=0"),
    ],
)
def test_what_would_learn_something_else_is_to_be_decided(tmp_path: Path, override: str, more: str) -> None:
    result = translated(tmp_path, *ON, override, more)
    assert finding(result, override.partition("=")[0]).outcome == "to be decided"


def test_distillation_that_is_off_changes_nothing(tmp_path: Path) -> None:
    off = config_of(tmp_path, "distillation.enabled=False", f"{LOSS}.use_task_rewards=False", f"{LOSS}.topk=8")
    assert off.teacher == config_of(tmp_path).teacher
    assert off.uses_critic


@pytest.mark.parametrize(
    "teachers",
    [
        "null",
        "[a,b]",
        "{t: {key: x}}",
        "{t: {model_path: A}, u: {model_path: B}}",
        "{t: {model_path: A, key: x}, u: {model_path: B, key: x}}",
        "{t: {model_path: A, key: x}, u: {key: y}}",
    ],
)
def test_teachers_without_a_model_or_a_key_of_their_own_are_to_be_decided(tmp_path: Path, teachers: str) -> None:
    result = translated(tmp_path, "distillation.enabled=True", f"distillation.teacher_models={teachers}")
    assert finding(result, "distillation.enabled").outcome == "to be decided"


def test_a_pool_of_several_machines_is_left_to_who_starts_the_groups(tmp_path: Path) -> None:
    config = config_of(tmp_path, *ON, "distillation.nnodes=2", "distillation.n_gpus_per_node=4")
    assert (config.services.launch, config.services.reward.num_processes) == ("external", 8)


def test_a_reward_model_without_a_pool_stays_with_the_critic_beside_a_pool_of_teachers(tmp_path: Path) -> None:
    model = ("reward.reward_model.enable=True", "reward.reward_model.model_path=rm")
    config = config_of(tmp_path, *ON, *model, "distillation.nnodes=1", "distillation.n_gpus_per_node=2")
    assert (config.placement.reward_model, config.placement.teacher) == ("critic", "reward")


def test_a_teacher_alone_leaves_all_that_scores_out(tmp_path: Path) -> None:
    unused = (
        "reward.reward_model.enable=True",
        "reward.reward_model.model_path=rm",
        "algorithm.filter_groups.enable=True",
        "reward_model.reward_kwargs.overlong_buffer_cfg={enable: true, len: 4, penalty_factor: 1.0}",
    )
    config = config_of(tmp_path, *ON, *unused, f"{LOSS}.use_task_rewards=False")
    assert (config.reward_model.model, config.algorithm.filter_groups.enable) == ("", False)
    assert not config.reward.overlong_buffer.enable


def test_a_pool_that_is_off_is_not_read(tmp_path: Path) -> None:
    assert config_of(tmp_path, "distillation.enabled=False", "distillation.nnodes=null").roles == ("actor", "critic")
