"""A run that trains adapters on policy and value model: resumed bit for bit, also with a rollout group."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from services.engine.export import main as export
from tests.support.runs import EACH_STEP, RunFolder, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OVERLAP = ("run.schedule=overlap", "evaluation.test_freq=-1", "evaluation.val_before_train=false")
GROUP = {"num_processes": 1, "threads": 1}


@pytest.fixture(scope="module")
def with_adapters(config: dict[str, Any]) -> dict[str, Any]:
    """Two actor ranks and a critic in bf16, whose adapters are trained; the reference is the policy without them."""
    adapted = copy.deepcopy({**config, "placement": {}})
    for role in ("actor", "critic"):
        adapted[role] |= {"lora_rank": 4, "lr": 1e-2}
    adapted["critic"] |= {"dtype": "bf16"}
    adapted["services"]["actor"] = {"num_processes": 2}
    return adapted


def resumed(config: dict[str, Any], folder: Path, *overrides: str) -> RunFolder:
    """A run that is stopped after step 2 and goes on."""
    with started(config, folder, *overrides, EACH_STEP, "run.stop_after_step=2") as first:
        first.complete()
    with started(config, folder, *overrides, EACH_STEP) as second:
        second.complete()
    assert "resumed after step 2" in second.output
    return second.folder


def test_a_run_with_adapters_resumes_bit_for_bit(with_adapters: dict[str, Any], tmp_path: Path) -> None:
    with started(with_adapters, tmp_path / "whole", *OVERLAP) as controller:
        whole = controller.complete()
    assert "actor: adapters with " in controller.output
    folder = resumed(with_adapters, tmp_path / "resumed", *OVERLAP)
    assert folder.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert {span["pool"] for span in whole.spans() if span["name"] == "ref"} == {"actor"}
    kl = [line["actor/reward_kl_penalty"] for line in whole.metrics]
    assert kl[0] == 0.0 != kl[-1]  # the reference is what the policy was
    for role in ("actor", "critic"):
        part = folder.checkpoint(3) / role
        assert export(["--checkpoint", str(part), "--output", str(tmp_path / role), "--adapter"]) == 0
        assert (tmp_path / role / "adapter_model.safetensors").stat().st_size < 1 << 20


def test_a_rollout_group_samples_with_merged_adapters(with_adapters: dict[str, Any], tmp_path: Path) -> None:
    config = {**with_adapters, "services": {**with_adapters["services"], "rollout": GROUP}}
    with started(config, tmp_path / "run", *OVERLAP, "rollout.check_freq=1") as controller:
        folder = controller.complete()
    differences = [line["training/rollout_probs_diff_max"] for line in folder.metrics]
    assert max(differences) <= 1e-4


def test_a_layer_that_does_not_exist_costs_one_sentence(with_adapters: dict[str, Any], tmp_path: Path) -> None:
    with started(with_adapters, tmp_path / "run", "actor.target_modules=[q_prj]") as controller:
        assert controller.wait() == 2
        controller.wait_nothing_is_left()
    assert "actor.target_modules: q_prj is no linear layer of Qwen2ForCausalLM; it has q_proj" in controller.output
    assert "Traceback" not in controller.output
