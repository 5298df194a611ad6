"""Whole runs of the controller on pretended GPUs: every way in which groups use them, to the end of the second step."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.kill_matrix.harness import with_incidents
from tests.support.runs import STALE, Inputs, RunFolder, started

PRETENDED = "REHEARSAL_LIBRARY" in os.environ
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not PRETENDED, reason="needs the pretended CUDA device: make rehearse-gpu"),
]
TWO_GPUS = ("services.actor.devices=[0]", "services.critic.devices=[1]")
BF16 = ("actor.dtype=bf16", "critic.dtype=bf16")
RUNS = {
    "FSDP2 on two ranks, with LoRA": (
        *(f"services.{role}.num_processes=2" for role in ("actor", "critic")),
        *("services.actor.devices=[0,1]", "services.critic.devices=[2,3]"),
        *(f"{role}.{key}" for role in ("actor", "critic") for key in ("strategy=fsdp2", "lora_rank=4")),
        *BF16,
    ),
    "a rollout group, one step behind": (*TWO_GPUS, *BF16, "services.rollout.devices=[2]", *STALE),
    "both pools sample": (*TWO_GPUS, *BF16, "services.rollout.devices=[1]", "rollout.share=0.5"),
    "one GPU for both": (
        *("services.actor.devices=[0]", "services.critic.devices=[0]", "services.allow_shared_devices=true"),
        *BF16,
    ),
}
# In a GPU run as in any other, rank 0 of the critic dies when it has taken half of its step.
KILLED_IN = 2
KILL = {"critic.update.mini_batch": {"step": KILLED_IN}}
OFFLOAD = [f"{role}.{what}_offload=true" for role in ("actor", "critic") for what in ("param", "optimizer")]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two steps without validation, in which both learn."""
    tree = Inputs.make(tmp_path_factory.mktemp("inputs")).config()
    short = {"run": {"total_steps": 2}, "critic": {**tree["critic"], "warmup_steps": 0}}
    return with_incidents({**tree, **short})


@pytest.fixture(scope="module")
def on_two_gpus(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return completed(config, tmp_path_factory.mktemp("two_gpus") / "run", *TWO_GPUS, *BF16)


def completed(config: dict[str, Any], folder: Path, *overrides: str) -> RunFolder:
    """Makes a run on four GPUs; fails unless it ends well, with numbers that are finite, and with weights on a GPU."""
    with started(config, folder, *overrides, devices="0,1,2,3") as controller:
        if controller.wait():
            logs = "\n".join(file.read_text()[-2000:] for file in sorted(folder.glob("logs/*_[0-9].log")))
            pytest.fail(f"{controller.output}\n{logs}")
        run = controller.complete()
    assert run.steps == [1, 2]
    for line in run.metrics:
        assert {name for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)} == set()
        assert line["perf/max_memory_allocated_gb"] > 0
    return run


def test_actor_and_critic_learn_on_two_gpus_in_bf16(on_two_gpus: RunFolder) -> None:
    assert {event["kind"] for event in on_two_gpus.events}.isdisjoint({"group_lost", "recovery"})


def test_the_log_of_a_rank_says_which_gpu_it_has(on_two_gpus: RunFolder) -> None:
    logs = [(on_two_gpus.path / "logs" / f"{role}_0.log").read_text() for role in ("actor", "critic")]
    assert [log.count(f", GPU {number} of nvidia-smi)") for number, log in enumerate(logs)] == [1, 1]


def test_weights_that_rest_in_main_memory_and_a_killed_critic_change_no_bit(
    config: dict[str, Any], on_two_gpus: RunFolder, tmp_path: Path
) -> None:
    killed = {**config, "debug": {"failpoints": KILL}}
    run = completed(killed, tmp_path / "run", *TWO_GPUS, *BF16, *OFFLOAD)
    assert [event["role"] for event in run.events if event["kind"] == "group_lost"] == ["critic"]
    assert run.summary["weights_sha256"] == on_two_gpus.summary["weights_sha256"]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_well(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    completed(config, tmp_path / "run", *RUNS[name])
