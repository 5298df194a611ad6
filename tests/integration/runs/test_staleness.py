"""Staleness 1: what a step learns from is data, so schedules, a resume and a kill change nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.external import ExternalGroups
from tests.support.meetings import PAUSE_POINT, let_go
from tests.support.runs import EACH_STEP, NUM_STEPS, STALE, RunFolder

pytestmark = pytest.mark.timeout(900)

OPTIONS = (*STALE, EACH_STEP)


def test_schedules_a_resume_and_the_loss_of_the_actor_end_with_the_same_weights(
    stale: RunFolder, groups: ExternalGroups, config: dict[str, Any]
) -> None:
    digests = [stale.summary["weights_sha256"]]
    with groups.started(*OPTIONS, "run.schedule=overlap") as controller:
        digests.append(controller.complete().summary["weights_sha256"])
    for folder in (stale, controller.folder):
        assert [line["training/staleness"] for line in folder.metrics[1:]] == [0.0, *[1.0] * (NUM_STEPS - 1)]

    groups.empty()
    with groups.started(*OPTIONS, "run.stop_after_step=2") as controller:
        controller.complete()
    assert (controller.folder.checkpoint(2) / "rollouts.safetensors").exists()
    with groups.started(*OPTIONS) as controller:
        digests.append(controller.complete().summary["weights_sha256"])
    assert "has no rollouts yet" not in controller.output

    # A refusal changes nothing: later checkpoints and the summary stay.
    file, kept, summary = (
        Path(config["data"]["train_files"]),
        controller.folder.committed_steps,
        controller.folder.summary,
    )
    content = file.read_text()
    file.write_text("".join(reversed(content.splitlines(keepends=True))))
    with groups.started(*OPTIONS, f"run.resume={controller.folder.checkpoint(2)}") as controller:
        status = controller.wait()
    file.write_text(content)
    assert status == 2, controller.output
    assert "data.train_files: the checkpoint holds responses to other prompts than these" in controller.output
    assert (controller.folder.committed_steps, controller.folder.summary) == (kept, summary)

    # In step 2, whose own rollouts come from the checkpoint of step 1 when the actor is there again.
    groups.empty(armed=[PAUSE_POINT])
    with groups.started(*OPTIONS) as controller:
        controller.wait_until(lambda folder: 1 in folder.committed_steps, "the checkpoint of step 1")
        for step in (2, 3):
            let_go(groups.folder.path, step)
        groups.restart("actor")
        digests.append(controller.complete().summary["weights_sha256"])
    assert "recovering in" in controller.folder.log("controller_0")
    assert digests == digests[:1] * 4
