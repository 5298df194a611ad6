"""Dynamic sampling and ReMax's greedy rollouts in real runs: full steps, and the same end after a kill."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.external import ExternalGroups
from tests.support.meetings import PAUSE_POINT, let_go
from tests.support.runs import Controller, RunFolder

pytestmark = pytest.mark.timeout(900)

# Whatever is answered, about half of the prompts have one score.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth[0] < "f":
        return float(ground_truth[0] < "c")
    return sum(letter in ground_truth for letter in solution_str) / 16
"""
NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES = 3, 8, 4
KILLED_IN = 2
SHORT = (
    f"run.total_steps={NUM_STEPS}",
    "rollout.stream_groups=1",
    f"data.train_batch_size={NUM_PROMPTS}",
    "evaluation={test_freq: -1, val_before_train: false}",
    "checkpoint.save_freq=1",
    "tracking.dump_rollouts=true",
)
DYNAMIC = (*SHORT, "algorithm.filter_groups={enable: true, metric: acc}", "data.gen_batch_size=12")
REMAX = (*SHORT, "algorithm.adv_estimator=remax")


@pytest.fixture
def reward(tmp_path: Path) -> str:
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    return f"reward.custom_function_path={file}"


def learning(folder: RunFolder) -> list[dict[str, Any]]:
    timed = ("timing", "perf/", "overlap/", "rpc/", "recovery/")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in folder.metrics]


def assert_same_end(folder: RunFolder, undisturbed: RunFolder) -> None:
    assert folder.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    assert learning(folder) == learning(undisturbed)


def undisturbed_run(groups: ExternalGroups, copy: Path, *overrides: str) -> RunFolder:
    groups.empty()
    with groups.started(*overrides, "run.schedule=serial") as controller:
        controller.complete()
    return groups.keep(copy)


def in_mid_step(controller: Controller) -> None:
    """Until the step before is saved; the actor's update is held, so it goes no further than that."""
    controller.wait_until(lambda folder: KILLED_IN - 1 in folder.committed_steps, "the checkpoint of the step before")


def go_on(groups: ExternalGroups) -> None:
    for step in range(KILLED_IN, NUM_STEPS + 1):
        let_go(groups.folder.path, step)


def test_every_step_is_full_of_groups_that_differ_and_a_killed_run_ends_with_the_same_weights(
    groups: ExternalGroups, reward: str, tmp_path: Path
) -> None:
    """The undisturbed run is serial, the killed one goes from gather to overlap."""
    undisturbed = undisturbed_run(groups, tmp_path / "undisturbed", *DYNAMIC, reward)
    for line in undisturbed.metrics:
        file = undisturbed.path / "rollouts" / "train" / f"{line['step']}.jsonl"
        scores = [json.loads(row)["score"] for row in file.read_text().splitlines()]
        assert len(scores) == NUM_PROMPTS * NUM_SAMPLES
        assert all(len({*scores[at : at + NUM_SAMPLES]}) > 1 for at in range(0, len(scores), NUM_SAMPLES))
        assert line["training/filter_groups/evicted_samples"] > 0
    assert sum(line["train/num_gen_batches"] for line in undisturbed.metrics) > NUM_STEPS

    groups.empty(armed=[PAUSE_POINT])
    with groups.started(*DYNAMIC, reward, "run.schedule=gather") as killed:
        in_mid_step(killed)
        killed.signal(signal.SIGKILL)
        killed.wait()
    go_on(groups)
    with groups.started(*DYNAMIC, reward, "run.schedule=overlap") as resumed:
        assert_same_end(resumed.complete(), undisturbed)
    assert f"resumed after step {KILLED_IN - 1}" in resumed.output


def test_a_step_that_cannot_be_filled_ends_the_run_in_a_sentence_and_leaves_its_checkpoints(
    groups: ExternalGroups, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(*args, **kwargs):\n    return 1.0\n")
    constant = f"reward.custom_function_path={tmp_path / 'reward.py'}"
    with groups.started(*DYNAMIC, constant) as controller:
        assert controller.wait() == 1
    (sentence,) = controller.errors
    assert "step 1 cannot be filled: after a whole data epoch without any group that differs it has 0 of 8" in sentence
    assert "12 were dropped because their samples are alike in 'acc' (all at 1: 12)" in sentence
    assert "; a resumed run keeps these keys, a new run may change them: run.dir=NEW; " in sentence
    assert sentence.endswith("; there is no earlier checkpoint, the run would start again at step 0")
    assert controller.folder.summary["exit_reason"] == "failed"


@pytest.mark.extended
def test_remax_ends_with_the_same_weights_when_the_actor_is_lost_in_mid_step(
    groups: ExternalGroups, reward: str, tmp_path: Path
) -> None:
    undisturbed = undisturbed_run(groups, tmp_path / "undisturbed", *REMAX, reward)
    assert all(0 < line["critic/greedy_score/mean"] < 1 for line in undisturbed.metrics)

    groups.empty(armed=[PAUSE_POINT])
    with groups.started(*REMAX, reward) as controller:
        in_mid_step(controller)
        go_on(groups)
        groups.restart("actor")
        assert_same_end(controller.complete(), undisturbed)
    assert controller.folder.metrics[-1]["recovery/num_restarts"] == 1
