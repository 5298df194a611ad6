"""Partial rollouts: what a step learns from follows from numbers of tokens, so nothing that happens changes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.external import ExternalGroups
from tests.support.meetings import PAUSE_POINT, let_go
from tests.support.runs import EACH_STEP, NUM_STEPS, PARTIAL, UNCUT, WHOLE

pytestmark = pytest.mark.timeout(900)

OPTIONS = (*PARTIAL, EACH_STEP)


def test_schedules_a_rollout_group_resumes_and_the_loss_of_the_actor_end_with_the_same_weights(
    groups: ExternalGroups, tmp_path: Path
) -> None:
    whole = groups.completed(tmp_path / "serial", *OPTIONS, "run.schedule=serial")
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


def test_responses_that_are_never_cut_give_the_weights_of_a_run_without_partial_rollouts(
    groups: ExternalGroups, tmp_path: Path
) -> None:
    off = groups.completed(tmp_path / "off", *UNCUT)
    on = groups.completed(tmp_path / "on", *WHOLE)
    assert on.summary["weights_sha256"] == off.summary["weights_sha256"]
