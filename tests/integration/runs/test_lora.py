"""Runs that train adapters, in rows that ranks divide: schedules, resumes and lost groups leave the weights alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.engine.export import main as export
from tests.kill_matrix.cells import Cell
from tests.kill_matrix.harness import run_cells, with_incidents
from tests.support.external import ExternalGroups, external_groups
from tests.support.runs import RunFolder, started

pytestmark = pytest.mark.timeout(600)

SERIAL, GATHER, OVERLAP = (f"run.schedule={schedule}" for schedule in ("serial", "gather", "overlap"))
IN_SYNC = Cell("rollout_0", "sync_half", "rollout.sync_weights", step=1)
PUBLISHING = Cell("actor_1", "publish_half", "actor.publish_weights", settings={"hit": 5})
LEARNING = Cell("critic_0", "between_mini_batches", "critic.update.mini_batch", step=3)


@pytest.fixture(scope="module")
def with_adapters(config: dict[str, Any]) -> dict[str, Any]:
    """Two actor ranks for each row, and a critic in bf16; the reference is the policy without its adapters."""
    adapted = copy.deepcopy({**config, "placement": {}, "evaluation": {"test_freq": -1, "val_before_train": False}})
    for role in ("actor", "critic"):
        adapted[role] |= {"lora_rank": 4, "lr": 1e-2}
    adapted["critic"] |= {"dtype": "bf16"}
    adapted["actor"] |= {"ulysses_sequence_parallel_size": 2}
    adapted["services"]["actor"] = {"num_processes": 2}
    return adapted


@pytest.fixture(scope="module")
def groups(with_adapters: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExternalGroups]:
    with external_groups(with_adapters, tmp_path_factory.mktemp("adapted") / "run") as groups:
        yield groups


def test_a_run_with_adapters_resumes_bit_for_bit_under_every_schedule(groups: ExternalGroups, tmp_path: Path) -> None:
    whole = groups.completed(tmp_path / "whole", SERIAL, "rollout.check_freq=1")
    assert max(line["training/rollout_probs_diff_max"] for line in whole.metrics) <= 1e-5
    folder = groups.resumed(OVERLAP, GATHER)
    assert "actor: adapters with " in whole.log("controller_0")
    assert folder.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert {span["pool"] for span in whole.spans() if span["name"] == "ref"} == {"actor"}
    kl = [line["actor/reward_kl_penalty"] for line in whole.metrics]
    assert kl[0] == 0.0 != kl[-1]  # the reference is what the policy was
    for role in ("actor", "critic"):
        part = folder.checkpoint(3) / role
        assert export(["--checkpoint", str(part), "--output", str(tmp_path / role), "--adapter"]) == 0
        assert (tmp_path / role / "adapter_model.safetensors").stat().st_size < 1 << 20


@pytest.fixture(scope="module")
def with_group(with_adapters: dict[str, Any]) -> dict[str, Any]:
    return with_incidents(with_adapters, rollout={"threads": 1}, actor={"num_processes": 2})


@pytest.mark.extended
def test_a_rollout_group_samples_with_merged_adapters(groups: ExternalGroups) -> None:
    groups.empty()
    with groups.with_rollout_group(), groups.started("rollout.check_freq=1", "run.stop_after_step=3") as controller:
        lines = controller.complete().metrics
    assert len(lines) == 3
    assert max(line["training/rollout_probs_diff_max"] for line in lines) <= 1e-4


@pytest.fixture(scope="module")
def undisturbed(with_group: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    with started(with_group, tmp_path_factory.mktemp("merged") / "run") as controller:
        return controller.complete()


@pytest.mark.extended
@pytest.mark.parametrize("cells", [[IN_SYNC, PUBLISHING], [LEARNING]])
def test_with_a_rollout_group_that_samples_with_merged_adapters_every_group_may_die(
    cells: list[Cell], undisturbed: RunFolder, with_group: dict[str, Any], tmp_path: Path
) -> None:
    verdict = run_cells(cells, with_group, tmp_path / "disturbed")
    assert verdict.failures(undisturbed.summary["weights_sha256"]) == []


@pytest.mark.extended
def test_a_pattern_that_matches_no_layer_costs_one_sentence(with_adapters: dict[str, Any], tmp_path: Path) -> None:
    with started(with_adapters, tmp_path / "run", "actor.target_modules=.*q_prj") as controller:
        assert controller.wait() == 2
        controller.wait_nothing_is_left()
    assert (
        "actor.target_modules: .*q_prj matches no linear layer of Qwen2ForCausalLM; it has q_proj" in controller.output
    )
    assert "Traceback" not in controller.output
