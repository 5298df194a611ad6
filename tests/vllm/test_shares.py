"""Both pools sample with vLLM: the actor's group, and a rollout group on the critic's core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kill_matrix.harness import run_cells, undisturbed_digests, with_incidents
from tests.kill_matrix.rollout_cells import CORE, share_cells
from tests.support.external import external_groups
from tests.support.runs import Inputs, RunFolder
from tests.vllm.conftest import Groups

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_STEPS = 3
# The step of each. With the actor or the critic, the other groups go back to the step before.
KILLED = {"rollout_0-generating_shared": 1, "actor_0-generating_shared": 2, "critic_0-turn_awaited_shared": 3}
ADAPTERS = {"lora_rank": 4, "lr": 1e-2}


def config_of(groups: Groups, inputs: Inputs) -> dict[str, Any]:
    tree = inputs.config()
    model = {"model": str(groups.model("qwen2"))}
    changes = {
        "run": {"total_steps": NUM_STEPS},
        "actor": model,
        "critic": model,
        "rollout": {"backend": "vllm", "vllm": {"kv_cache_gb": 0.1}, "share": 0.5},
        "services": {"critic": {"cpus": [CORE]}, "rollout": {"cpus": [CORE], "threads": 1}},
        "checkpoint": {"save_freq": 1},
        "tracking": {"dump_rollouts": True},
    }
    return {**tree, **{section: {**tree.get(section, {}), **keys} for section, keys in changes.items()}}


def rollouts(folder: RunFolder) -> list[list[dict[str, Any]]]:
    files = [folder.path / "rollouts" / "train" / f"{step}.jsonl" for step in range(1, NUM_STEPS + 1)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.extended
def test_a_streamed_run_and_a_resumed_one_of_other_schedules_sample_the_same_tokens_with_two_engines(
    groups: Groups, tmp_path: Path
) -> None:
    config = config_of(groups, Inputs.make(tmp_path / "inputs"))
    with external_groups(config, tmp_path / "run", allow_shared_devices=True) as pools:
        with pools.started("run.schedule=overlap") as controller:
            overlap = pools.keep(controller.complete().path.with_name("overlap"))
        pools.empty()
        with pools.started("run.schedule=serial", "run.stop_after_step=1") as controller:
            controller.complete()
        with pools.started("run.schedule=gather") as controller:
            others = controller.complete()
    assert rollouts(others) == rollouts(overlap)
    assert others.summary["weights_sha256"] == overlap.summary["weights_sha256"]
    for line in overlap.metrics[1:]:
        assert line["training/rollout_log_probs_diff_max"] <= 1e-4
    sampled = [span["pool"] for span in overlap.spans() if span["name"] == "gen"]
    assert sampled.count("actor") == sampled.count("rollout") == NUM_STEPS


@pytest.mark.extended
@pytest.mark.parametrize("trained", [{}, ADAPTERS], ids=["all weights", "adapters"])
def test_the_loss_of_each_group_while_two_engines_sample_changes_no_weight(
    groups: Groups, trained: dict[str, Any], tmp_path: Path
) -> None:
    config = with_incidents(config_of(groups, Inputs.make(tmp_path / "inputs")))
    for role in ("actor", "critic"):
        config[role] = {**config[role], **trained}
    cells = [{cell.name: cell for cell in share_cells(step)}[name] for name, step in KILLED.items()]
    undisturbed = undisturbed_digests(config, tmp_path / "undisturbed", *cells[0].kind, "run.schedule=serial")
    assert run_cells(cells, config, tmp_path / "run").failures(undisturbed) == []
