"""Partial rollouts: what a step learns from follows from numbers of tokens, so nothing that happens changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.external import ExternalGroups
from tests.support.meetings import PAUSE_POINT, let_go
from tests.support.runs import EACH_STEP, NUM_STEPS, PARTIAL, UNCUT, WHOLE, RunFolder, started

pytestmark = pytest.mark.timeout(900)

OPTIONS = (*PARTIAL, EACH_STEP)


@pytest.fixture(scope="module")
def whole(one_rank: ExternalGroups, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """An undisturbed run on one actor rank. Only to be read."""
    assert not one_rank.is_lent, "its run folder is another test's now"
    return one_rank.completed(tmp_path_factory.mktemp("partial") / "serial", *OPTIONS, "run.schedule=serial")


def test_schedules_a_rollout_group_resumes_and_the_loss_of_the_actor_end_with_the_same_weights(
    whole: RunFolder, groups: ExternalGroups, tmp_path: Path
) -> None:
    digests = [whole.summary["weights_sha256"]]
    assert max(line["partial/num_pending"] for line in whole.metrics[1:]) > 0
    assert max(line["partial/max_age"] for line in whole.metrics[1:]) > 0
    assert (whole.metrics[-1]["partial/num_pending"], whole.metrics[-1]["partial/num_waiting"]) == (0, 0)
    groups.empty()
    with groups.with_rollout_group():
        digests.append(groups.completed(tmp_path / "group", *OPTIONS).summary["weights_sha256"])

    # Every step is begun by another start.
    groups.empty()
    for step in range(1, NUM_STEPS):
        with groups.started(*OPTIONS, "run.schedule=overlap", f"run.stop_after_step={step}") as controller:
            controller.complete()
        assert (controller.folder.checkpoint(step) / "rollouts.safetensors").exists()
    with groups.started(*OPTIONS, "run.schedule=overlap") as controller:
        digests.append(controller.complete().summary["weights_sha256"])
    assert not (controller.folder.checkpoint(NUM_STEPS) / "rollouts.safetensors").exists()

    groups.empty(armed=[PAUSE_POINT])
    with groups.started(*OPTIONS) as controller:
        controller.wait_until(lambda folder: 1 in folder.committed_steps, "the checkpoint of step 1")
        for step in (2, 3):
            let_go(groups.folder.path, step)
        groups.restart("actor")
        digests.append(controller.complete().summary["weights_sha256"])
    assert "recovering in" in controller.folder.log("controller_0")
    assert digests == digests[:1] * 4


def rows_of(run: RunFolder, step: int) -> list[dict[str, Any]]:
    file = run.path / f"rollouts/train/{step}.parquet"
    return pq.read_table(file, columns=["prompt_index", "sample", "response", "version"]).to_pylist()


def test_two_actor_ranks_learn_from_the_rows_that_one_learns_from(
    whole: RunFolder, config: dict[str, Any], tmp_path: Path
) -> None:
    ranks = "services.actor.num_processes=2"
    with started(config, tmp_path / "run", *OPTIONS, ranks, "run.stop_after_step=2") as controller:
        two = controller.complete()
    for step in (1, 2):  # both sample with the initial weights, for the first step trains the critic only
        assert rows_of(two, step) == rows_of(whole, step)
        one = {name: value for name, value in whole.metrics[step].items() if name.startswith("partial/")}
        assert {name: value for name, value in two.metrics[step].items() if name.startswith("partial/")} == one
    assert any(len({*row["version"]}) > 1 for row in rows_of(two, 2))


def test_responses_that_are_never_cut_give_the_weights_of_a_run_without_partial_rollouts(
    groups: ExternalGroups, tmp_path: Path
) -> None:
    off = groups.completed(tmp_path / "off", *UNCUT)
    on = groups.completed(tmp_path / "on", *WHOLE)
    assert on.summary["weights_sha256"] == off.summary["weights_sha256"]
