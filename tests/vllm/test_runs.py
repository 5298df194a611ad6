"""Whole runs that sample with vLLM: streaming, memory, dead ranks, learning, and configurations that cannot work."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from recipes.sort_letters import quickstart
from splitppo.config import load_config
from tests.groups import is_alive
from tests.runs import Inputs, RunFolder, started
from tests.vllm.conftest import Groups

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS = 20
SETTLED_STEP = 5
MAX_GROWTH = 1.05


@pytest.fixture(scope="module")
def config(groups: Groups, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of 32 responses a step, or more, on a model that vLLM can compute."""
    tree = Inputs.make(tmp_path_factory.mktemp("inputs")).config()
    model = str(groups.model("qwen2"))
    tree["actor"] |= {"model": model, "ppo_epochs": 1}
    tree["critic"] |= {"model": model, "ppo_epochs": 1}
    tree["rollout"] |= {"backend": "vllm", "vllm": {"kv_cache_gb": 0.1}}
    tree["evaluation"] = {"test_freq": -1}
    return tree


@pytest.fixture(scope="module")
def streamed(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, dict[int, int]]:
    """A run of 20 steps in four groups each, and the resident memory of the actor's rank after each of its steps."""
    overrides = [
        f"run.total_steps={NUM_STEPS}",
        "rollout.stream_groups=4",
        "rollout.n=32",
        "rollout.vllm.max_num_seqs=6",  # many waves: the first group ends long before the last one
        "data.max_response_length=96",
        "checkpoint.save_freq=-1",
    ]
    resident: dict[int, int] = {}

    def look(folder: RunFolder) -> bool:
        if folder.metrics and folder.pids("actor"):
            resident[folder.steps[-1]] = resident_bytes(folder.pids("actor")[0])
        return bool(folder.metrics) and folder.steps[-1] == NUM_STEPS - 1

    with started(config, tmp_path_factory.mktemp("streamed") / "run", *overrides) as controller:
        controller.wait_until(look, "the last step but one")
        return controller.complete(), resident


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_values_of_the_first_group_begin_while_the_actor_generates(
    streamed: tuple[RunFolder, dict[int, int]],
) -> None:
    folder, _ = streamed
    for step in range(1, NUM_STEPS + 1):
        spans = [span for span in folder.spans() if span["step"] == step]
        [generation] = [span for span in spans if span["name"] == "gen"]
        values = sorted(span["start"] for span in spans if span["name"] == "values")
        assert len(values) == 4
        assert generation["start"] < values[0] < generation["end"], step


def test_every_step_compares_the_log_probs(streamed: tuple[RunFolder, dict[int, int]]) -> None:
    lines = [line for line in streamed[0].metrics if line["step"]]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert max(line["training/rollout_log_probs_diff_max"] for line in lines) <= 1e-4
    assert all("rollout_corr/kl" in line and "training/rollout_probs_diff_max" in line for line in lines)


def test_memory_settles(streamed: tuple[RunFolder, dict[int, int]]) -> None:
    _, resident = streamed
    settled = resident[min(step for step in resident if step >= SETTLED_STEP)]
    assert resident[max(resident)] <= MAX_GROWTH * settled, resident


def test_a_rank_that_is_killed_takes_its_replica_along_and_the_run_goes_on(
    config: dict[str, Any], tmp_path: Path
) -> None:
    overrides = [
        "run.total_steps=3",
        "services.actor.num_processes=2",
        "rollout.vllm.tensor_model_parallel_size=2",
        "checkpoint.save_freq=1",
    ]
    shared_before = set(Path("/dev/shm").iterdir())
    with started(config, tmp_path / "run", *overrides) as controller:
        controller.wait_until(lambda folder: folder.committed_steps, "a checkpoint")
        victims = controller.folder.pids("actor")
        os.kill(victims[1], signal.SIGKILL)
        folder = controller.complete()
    assert not any(map(is_alive, victims))
    assert [step for step in folder.steps if step] == [1, 2, 3]
    assert "recovering in 1 s: actor" in controller.output
    assert {name for name in set(Path("/dev/shm").iterdir()) - shared_before if "tp" in name.name} == set()


def test_the_quickstart_learns(tmp_path: Path) -> None:
    quickstart.prepare()
    tree = load_config(quickstart.CONFIG, [f"run.dir={tmp_path}"]).model_dump(mode="json")
    tree["rollout"]["backend"] = "vllm"
    tree["rollout"]["check_freq"] = None
    tree["rollout"]["vllm"]["kv_cache_gb"] = 0.2
    with started(tree, tmp_path / "run") as controller:
        accuracy = controller.complete().summary["validation"]
    assert accuracy["before"]["overall"] < 0.5
    assert accuracy["after"]["overall"] >= 0.85


def test_what_vllm_cannot_do_is_one_sentence(config: dict[str, Any], tmp_path: Path) -> None:
    overrides = ["rollout.vllm.kv_cache_gb=0.0001"]
    with started(config, tmp_path / "run", *overrides) as controller:
        assert controller.wait() == 2
    assert "error: actor: rollout.vllm.kv_cache_gb (0.0001) must hold one sequence of 48 tokens" in controller.output
    assert "Traceback" not in controller.output
