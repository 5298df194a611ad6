"""The memory plan of --check: the table, unknown models, and groups that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.memory.gpus import visible_gpus, way_out
from controller.memory.plan import PROOF, PROOF_IN_TRAINING, MemoryPlan, memory_plan
from services.engine.forward_proof import ROW_LENGTHS
from splitppo.config import Config
from tests.support.fake_gpus import put_gpus
from tests.support.fake_services import make_config
from tests.support.models import save_policy, save_reward_model, save_shapes

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_policy(tmp_path_factory.mktemp("policy")))


def on_gpus(tmp_path: Path, model: str, **changes: Any) -> Config:
    """Both groups on one GPU each."""
    devices = {"services__actor__devices": [0], "services__critic__devices": [1]}
    return make_config(tmp_path / "run", **{"actor__model": model} | devices | changes)


def test_the_table_names_every_term_and_the_peak(tmp_path: Path, model: str) -> None:
    plan = memory_plan(make_config(tmp_path / "run", actor__model=model, algorithm__use_kl_in_reward=True), {})
    lines = str(plan).splitlines()
    assert lines[0] == "memory of each of 1 ranks of the actor (CPU), GiB, estimated:"
    assert lines[1].split() == ["generate", "log-probs", "reference", "backward", "optimizer", "step", "saving"]
    named = {line[:20].strip() for line in lines}
    assert {"weights", "gradients", "optimizer", "reference", "KV cache", "activations", "checkpoint", "total"} <= named
    assert any(line.startswith("peak 0.") for line in lines)
    assert [group.role for group in plan.groups] == ["actor", "critic"]


def test_the_cost_of_the_proof_at_a_start_is_said_for_each_group(tmp_path: Path) -> None:
    seven_billion = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    model = str(save_shapes(tmp_path / "7b", **seven_billion, num_attention_heads=32, num_key_value_heads=32))
    for dtype, said in (("fp32", "6 passes of short rows through their weights, 2.1 TFLOP"), ("bf16", "11 passes")):
        config = make_config(tmp_path / dtype, actor__model=model, actor__dtype=dtype, critic__dtype=dtype)
        *_, actor, critic = str(memory_plan(config, {})).splitlines()
        assert actor.startswith("proof of the actor's models at each start: ")
        assert critic.startswith("proof of the critic's models at each start: ")
        assert said in actor
        assert "code is made" not in actor
    with_code = make_config(tmp_path / "compiled", actor__model=model, actor__compile=True)
    *_, actor, critic = str(memory_plan(with_code, {})).splitlines()
    assert "before it code is made (compile)" in actor
    assert "code is made" not in critic


def test_the_proof_has_as_many_passes_and_tokens_as_the_engine_makes() -> None:
    rows = [sum(row) for row in ROW_LENGTHS["policy"]]
    padded = len(rows) * max(rows)
    assert PROOF["fp32"] == (1 + len(rows), 2 * sum(rows))
    assert PROOF["bf16"] == (1 + 2 * len(rows) + 1, 3 * sum(rows) + padded)
    assert (1, sum(rows)) == PROOF_IN_TRAINING


def test_saving_on_gpus_is_of_main_memory_and_no_part_of_the_peak(tmp_path: Path, model: str) -> None:
    group = memory_plan(on_gpus(tmp_path, model), {}).groups[0]
    plan = MemoryPlan((group,), {})
    assert "saving (host)" in str(plan)
    assert "of main memory while it saves" in str(plan).splitlines()[-1]
    assert group.saving is not None
    assert (group.saving.weights, group.saving.optimizer, group.peak.checkpoint) == (0, 0, 0)
    assert group.saving.checkpoint > 0


def test_the_reference_can_be_on_either_group(tmp_path: Path, model: str) -> None:
    for host in ("actor", "critic"):
        changes = {"algorithm__use_kl_in_reward": True, "placement": {"reference": host}}
        groups = memory_plan(make_config(tmp_path / "run", actor__model=model, **changes), {}).groups
        assert [group.role for group in groups if group.peak.reference] == [host]


def test_the_reward_model_counts_on_the_critic(tmp_path: Path, model: str) -> None:
    rm = str(save_reward_model(tmp_path / "rm"))
    plan = memory_plan(make_config(tmp_path / "run", actor__model=model, reward_model__model=rm), {})
    assert [group.role for group in plan.groups if group.peak.reward_model] == ["critic"]
    assert "reward" in plan.groups[1].phases
    assert "reward model" in str(plan)
    alone = memory_plan(
        make_config(tmp_path / "run", actor__model=model, reward_model__model=rm, placement__reward_model="reward"), {}
    )
    assert [(group.role, list(group.phases)) for group in alone.groups if group.peak.reward_model] == [
        ("reward", ["reward"])
    ]
    assert alone.groups[2].peak.weights == alone.groups[2].peak.optimizer == 0
    away = memory_plan(make_config(tmp_path / "run", actor__model=model, reward_model__model="some/rm"), {})
    assert list(away.unknown) == ["critic"]


def test_all_teachers_count_where_they_compute(tmp_path: Path, model: str) -> None:
    other = str(save_policy(tmp_path / "other"))
    teachers = {"teacher__model": model, "teacher__models": {"math": other}, "algorithm__adv_estimator": "grpo"}
    for host in ("actor", "reward"):
        config = make_config(tmp_path / "run", actor__model=model, **teachers, placement__teacher=host, rollout__n=2)
        groups = memory_plan(config, {}).groups
        [hosting] = [group for group in groups if group.peak.teacher]
        assert (hosting.role, "teacher" in hosting.phases) == (host, True)
        assert hosting.phases["teacher"].activations > 0
        [actor] = [group for group in groups if group.role == "actor"]
        assert hosting.peak.teacher == 2 * actor.phases["generate"].weights, "two models as large as the actor's, fp32"


def test_a_teacher_that_does_not_fit_has_a_way_out(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11_008, "vocab_size": 32_000}
    large = str(save_shapes(tmp_path / "large", **sizes, num_attention_heads=32, num_key_value_heads=32))
    small = str(save_policy(tmp_path / "small"))
    services = {"services__actor": {"devices": [0]}, "services__critic": {"devices": [1]}}
    config = make_config(tmp_path / "run", actor__model=small, teacher__model=large, **services)
    misfit = memory_plan(config, {0: 24 << 30, 1: 24 << 30}).misfit
    assert misfit is not None
    assert misfit.startswith("GPU 1 (services.critic.devices) has 24.0 GiB")
    assert "the largest term is teacher of the critic" in misfit
    assert misfit.endswith("set placement.teacher to reward, a group with GPUs of its own")


def test_a_model_that_is_not_here_is_unknown_and_the_other_group_is_estimated(tmp_path: Path, model: str) -> None:
    plan = memory_plan(make_config(tmp_path / "run", actor__model="some/model", critic__model=model), {})
    assert [group.role for group in plan.groups] == ["critic"]
    assert "memory of the actor: unknown: some/model is not in a local folder" in str(plan).splitlines()


def test_what_fits_is_no_misfit(tmp_path: Path, model: str) -> None:
    plan = memory_plan(on_gpus(tmp_path, model), {0: 4 * GIB, 1: 4 * GIB})
    assert (len(plan.groups), plan.misfit) == (2, None)


def test_what_cannot_fit_is_one_sentence(tmp_path: Path, model: str) -> None:
    misfit = memory_plan(on_gpus(tmp_path, model), {0: 80 * GIB, 1: GIB // 2}).misfit
    assert str(misfit).startswith(
        "GPU 1 (services.critic.devices) has 0.5 GiB, but the critic (1.0 GiB per rank) would need about 1.0 GiB there;"
        " the largest term is process of the critic in its phase backward (1.0 GiB):"
    )


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({"rollout__n": 4096, "actor__ppo_micro_batch_size_per_gpu": 1}, "lower rollout.max_batch_size"),
        ({"rollout__n": 4096, "rollout__max_batch_size": 1}, "set actor.gradient_checkpointing to true"),
        (
            {"rollout__n": 4096, "rollout__max_batch_size": 1, "actor__ppo_micro_batch_size_per_gpu": 4096}
            | {"actor__gradient_checkpointing": True},
            "lower actor.ppo_micro_batch_size_per_gpu",
        ),
        (
            {"rollout__backend": "vllm", "rollout__vllm__gpu_memory_utilization": 0.9},
            "lower rollout.vllm.gpu_memory_utilization",
        ),
    ],
)
def test_the_sentence_names_the_key_that_lowers_the_largest_term(
    tmp_path: Path, changes: dict[str, Any], way_out: str
) -> None:
    model = str(save_policy(tmp_path / "policy", hidden_size=256, intermediate_size=512, num_hidden_layers=8))
    large = {"rollout__max_batch_size": 4096, "actor__ppo_max_token_len_per_gpu": 1 << 18}
    config = on_gpus(tmp_path, model, **large | changes)
    assert str(memory_plan(config, {0: 5 * GIB // 4}).misfit).endswith(f": {way_out}")


@pytest.mark.parametrize(("host", "other"), [("actor", "critic"), ("critic", "actor")])
def test_a_reference_that_is_too_large_has_another_place(tmp_path: Path, model: str, host: str, other: str) -> None:
    changes = {"algorithm__use_kl_in_reward": True, "placement": {"reference": host}}
    config = on_gpus(tmp_path, model, **changes)
    [group] = [group for group in memory_plan(config, {}).groups if group.role == host]
    assert way_out(config, group, "reference") == f"set placement.reference to {other}"


def test_groups_that_share_a_gpu_add_up(tmp_path: Path, model: str) -> None:
    shared = {"services__critic__devices": [0], "services__allow_shared_devices": True}
    config = on_gpus(tmp_path, model, **shared)
    plan = memory_plan(config, {0: 3 * GIB})
    assert plan.misfit is None
    assert all(group.peak.total < 3 * GIB // 2 for group in plan.groups)
    misfit = str(memory_plan(config, {0: 3 * GIB // 2}).misfit)
    assert misfit.startswith("GPU 0 ")
    assert " but the actor (1.0 GiB per rank) and critic (1.0 GiB per rank) " in misfit


def test_groups_that_take_turns_on_a_gpu_are_not_both_at_their_peak(tmp_path: Path, model: str) -> None:
    many = {"data__max_response_length": 1 << 10, "rollout__n": 4096, "rollout__max_batch_size": 4096}
    large = {"critic__ppo_max_token_len_per_gpu": 1 << 18}
    config = on_gpus(tmp_path, model, services__rollout={"devices": [1]}, **many | large)
    _, critic, rollout = memory_plan(config, {}).groups
    in_turns = max(
        critic.peak.total + rollout.phases["at rest"].total, critic.phases["at rest"].total + rollout.peak.total
    )
    assert in_turns < critic.peak.total + rollout.peak.total - GIB
    assert memory_plan(config, {1: in_turns}).misfit is None
    misfit = str(memory_plan(config, {1: in_turns - 1}).misfit)
    assert misfit.startswith("GPU 1 ")
    assert " but the critic (" in misfit
    assert f" would need about {in_turns / GIB:.1f} GiB there, in turns; the largest term is " in misfit


def test_gpus_that_nvml_does_not_know_are_no_misfit(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_gpus(monkeypatch, None)
    config = on_gpus(tmp_path, model)
    plan = memory_plan(config, visible_gpus(config))
    assert (len(plan.groups), plan.misfit) == (2, None)


def test_gpus_are_asked_for_only_where_groups_start_here_and_use_them(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_gpus(monkeypatch, [1 << 20])
    assert visible_gpus(on_gpus(tmp_path, model)) == {0: 1 << 20}
    addresses = {"services__actor__address": "127.0.0.1:7001", "services__critic__address": "127.0.0.1:7002"}
    assert visible_gpus(on_gpus(tmp_path, model, services__launch="external", **addresses)) == {}
    assert visible_gpus(make_config(tmp_path / "run", actor__model=model)) == {}


def test_a_rollout_group_has_a_table_and_is_compared_with_its_own_gpus(tmp_path: Path, model: str) -> None:
    config = on_gpus(tmp_path, model, services__rollout={"num_processes": 2, "devices": [2, 3]})
    gpus = {0: 80 * GIB, 1: 80 * GIB, 2: 80 * GIB, 3: GIB // 2}
    plan = memory_plan(config, gpus)
    assert "memory of each of 2 ranks of the rollout (GPU 2, 3), GiB, estimated:" in str(plan).splitlines()
    assert str(plan.misfit).startswith(
        "GPU 3 (services.rollout.devices) has 0.5 GiB, but the rollout (1.0 GiB per rank)"
    )
    # Of two unequal GPUs, the smaller one sizes vLLM's share on every rank.
    config = on_gpus(
        tmp_path, model, services__rollout={"num_processes": 2, "devices": [2, 3]}, rollout__backend="vllm"
    )
    plan = memory_plan(config, gpus | {3: 8 * GIB})
    assert [(group.role, group.peak.vllm) for group in plan.groups] == [
        ("actor", 0),
        ("critic", 0),
        ("rollout", 4 * GIB),
    ]


@pytest.mark.parametrize(
    ("term", "dtype", "advice"),
    [
        ("weights", "fp32", "set actor.dtype to bf16"),
        ("weights", "bf16", "set rollout.backend to vllm"),
        ("kv_cache", "fp32", "lower rollout.max_batch_size"),
        ("vllm", "fp32", "lower rollout.vllm.gpu_memory_utilization"),
        ("process", "fp32", "choose other GPUs in services.rollout.devices"),
    ],
)
def test_what_lowers_the_memory_of_a_rollout_group(
    tmp_path: Path, model: str, term: str, dtype: str, advice: str
) -> None:
    config = on_gpus(tmp_path, model, services__rollout={"devices": [2]}, actor__dtype=dtype)
    assert way_out(config, memory_plan(config, {}).groups[-1], term) == advice
