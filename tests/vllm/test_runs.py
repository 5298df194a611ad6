"""Whole runs that sample with vLLM: learning, memory, streaming, dead ranks, and configurations that cannot work."""

from __future__ import annotations

import copy
import os
import re
import signal
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from recipes.sort_letters.prepare import RECIPE
from splitppo.config import load_config
from tests.kill_matrix.conversation_cells import LIMITS, echo
from tests.support.groups import is_alive
from tests.support.meetings import is_paused, let_go, parts_meet_values, pause_at
from tests.support.runs import Inputs, RunFolder, started
from tests.vllm.conftest import Groups

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_STEPS = 3
# The actor waits there for its death, before any part of the step: a failpoint that was passed does not wait again.
KILLED_AT, KILLED_IN = "actor.generate", 2
# Where the actor's memory is measured: it waits there, so that every measurement is of the same moment of a step.
MEASURED_AT = "actor.update.begin"
# Caches fill before: 40 MiB come in the first twenty steps, 15 MiB in the next twenty, and a leak goes on.
FIRST_STEPS, LAST_STEPS = range(20, 25), range(40, 45)
MAX_GROWTH = 1.05


@pytest.fixture(scope="module")
def config(groups: Groups, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of 32 responses a step on a model that vLLM can compute; two ranks share the engine."""
    tree = Inputs.make(tmp_path_factory.mktemp("inputs")).config()
    model = str(groups.model("qwen2"))
    tree["run"]["total_steps"] = NUM_STEPS
    tree["actor"] |= {"model": model}
    tree["critic"] |= {"model": model}
    tree["rollout"] |= {"backend": "vllm", "vllm": {"kv_cache_gb": 0.1, "tensor_model_parallel_size": 2}}
    tree["services"]["actor"] = {"num_processes": 2}
    tree["evaluation"] = {"test_freq": -1}
    tree["debug"] = {"failpoints": parts_meet_values(NUM_STEPS) | pause_at(KILLED_AT, [KILLED_IN])}
    return tree


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The quickstart's configuration, with vLLM."""
    RECIPE.prepare()
    tree = load_config(RECIPE.config_file, [f"run.dir={tmp_path_factory.mktemp('unused')}"]).model_dump(mode="json")
    tree["rollout"]["backend"] = "vllm"
    tree["rollout"]["check_freq"] = None
    tree["algorithm"]["rollout_correction"]["bypass_mode"] = "auto"
    return tree


def test_the_quickstart_learns_and_every_step_compares_the_log_probs(
    quickstart: dict[str, Any], tmp_path: Path
) -> None:
    with started(quickstart, tmp_path / "run") as controller:
        folder = controller.complete()
    accuracy = folder.summary["validation"]
    assert accuracy["before"]["overall"] < 0.5
    assert accuracy["after"]["overall"] >= 0.85
    lines = [line for line in folder.metrics if line["step"]]
    assert [line["step"] for line in lines] == list(range(1, folder.summary["global_step"] + 1))
    assert max(line["training/rollout_log_probs_diff_max"] for line in lines) <= 1e-4
    assert all("rollout_corr/kl" in line and "training/rollout_probs_diff_max" in line for line in lines)


@pytest.mark.extended
def test_the_actors_memory_settles(quickstart: dict[str, Any], tmp_path: Path) -> None:
    """At the beginning of updates, early and late."""
    measured = (*FIRST_STEPS, *LAST_STEPS)
    tree = copy.deepcopy(quickstart)
    tree["run"]["total_steps"] = LAST_STEPS.stop
    tree["rollout"]["vllm"]["kv_cache_gb"] = 0.05  # its pages become resident when they are used first
    tree["debug"]["failpoints"] = pause_at(MEASURED_AT, measured)
    resident: dict[int, int] = {}
    with started(tree, tmp_path / "run") as controller:
        for step in measured:
            controller.wait_until(partial(has_come_to, step), f"the update of step {step}")
            resident[step] = own_bytes(controller.folder.pids("actor")[0])
            let_go(controller.folder.path, step)
        controller.complete()
    first, last = (median(resident[step] for step in steps) for steps in (FIRST_STEPS, LAST_STEPS))
    assert last <= MAX_GROWTH * first, resident


def has_come_to(step: int, folder: RunFolder) -> bool:
    return is_paused(folder.path, MEASURED_AT, step)


def waits_for_its_death(folder: RunFolder) -> bool:
    return bool(folder.committed_steps) and is_paused(folder.path, KILLED_AT, KILLED_IN)


def own_bytes(pid: int) -> int:
    """Resident memory that belongs to no file: how much of the files stays resident is up to the machine's load."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(kib) << 10 for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", status, re.MULTILINE))


def test_a_rank_that_is_killed_takes_its_replica_along_and_the_streamed_run_goes_on(
    config: dict[str, Any], tmp_path: Path
) -> None:
    shared_before = set(Path("/dev/shm").iterdir())
    with started(config, tmp_path / "run", "checkpoint.save_freq=1") as controller:
        controller.wait_until(waits_for_its_death, "a checkpoint, and the generation after it")
        victims = controller.folder.pids("actor")
        os.kill(victims[1], signal.SIGKILL)
        controller.wait_until(lambda _: not any(map(is_alive, victims)), "the death of all ranks")
        let_go(controller.folder.path, KILLED_IN)
        folder = controller.complete()
    assert [step for step in folder.steps if step] == [1, 2, 3]
    assert "recovering in 1 s: actor" in controller.output
    assert {name for name in set(Path("/dev/shm").iterdir()) - shared_before if "tp" in name.name} == set()
    for step in range(1, NUM_STEPS + 1):
        spans = [span for span in folder.spans() if span["step"] == step]
        [generation] = [span for span in spans if span["name"] == "gen"]
        values = sorted(span["start"] for span in spans if span["name"] == "values")
        assert len(values) == 2
        assert generation["start"] < values[0] < generation["end"], step


@pytest.mark.extended
def test_what_vllm_cannot_do_is_one_sentence(config: dict[str, Any], tmp_path: Path) -> None:
    overrides = ["rollout.vllm.kv_cache_gb=0.00005"]
    with started(config, tmp_path / "run", *overrides) as controller:
        assert controller.wait() == 2
    assert "error: actor: rollout.vllm.kv_cache_gb (5e-05) must hold one sequence of 48 tokens" in controller.output
    assert "Traceback" not in controller.output


@pytest.mark.extended
def test_conversations_end_with_the_same_weights_under_any_schedule(config: dict[str, Any], tmp_path: Path) -> None:
    digests = []
    options = ("rollout.stream_groups=1", *LIMITS)
    config = {name: section for name, section in config.items() if name != "debug"}
    for schedule, kwargs in (("serial", {}), ("overlap", {"max_pause_s": 0.02, "kills": str(tmp_path / "killed")})):
        with started(config, tmp_path / schedule, f"run.schedule={schedule}", *options, echo(**kwargs)) as controller:
            digests.append(controller.complete().summary["weights_sha256"])
        for line in controller.folder.metrics[1:]:
            assert line["num_turns/mean"] == 3.0
            assert line["training/rollout_log_probs_diff_max"] < 1e-4
    assert (tmp_path / "killed").exists()
    assert digests[0] == digests[1]
