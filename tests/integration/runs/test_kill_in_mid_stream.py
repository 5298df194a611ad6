"""An actor that dies after it has handed on a part of a streamed generation, which the critic has worked on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import RunFolder, started

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(600)]

STEP = 2
NUM_ROWS, BATCH_ROWS = 32, 2  # responses of a step, and such as are decoded together
OVERRIDES = (
    f"run.total_steps={STEP}",
    "rollout.stream_groups=2",
    f"rollout.max_batch_size={BATCH_ROWS}",
    "data.max_response_length=48",
    "evaluation.test_freq=-1",
    "evaluation.val_before_train=false",
    "actor.ppo_epochs=1",
    "critic.ppo_epochs=1",
    "checkpoint.save_freq=1",
    "services.restart_backoff_s=0.1",
)


def values_done(folder: RunFolder) -> int:
    """How often the critic has computed values."""
    return folder.log("critic_0").count("ComputeValues done")


def test_a_streamed_run_ends_with_the_weights_of_an_undisturbed_one(config: dict[str, Any], tmp_path: Path) -> None:
    with started(config, tmp_path / "undisturbed", *OVERRIDES) as controller:
        undisturbed = controller.complete()
    # Three quarters of all token boundaries lie in the second group. Values of this step begin before its
    # generation has ended only because the first group was handed on.
    hit = round(3 / 4 * undisturbed.metrics[-1]["response_length/mean"] * NUM_ROWS / BATCH_ROWS)
    kill = {"step": STEP, "hit": hit, "after": {"point": "critic.compute_values", "step": STEP}}
    config = {**config, "debug": {"failpoints": {"actor.generate": kill}}}
    with started(config, tmp_path / "run", *OVERRIDES) as controller:
        folder = controller.complete()
    (fired,) = (folder.path / "failpoints").glob("*.fired")
    assert json.loads(fired.read_text())["step"] == STEP
    assert folder.metrics[-1]["recovery/num_restarts"] == 1
    assert values_done(folder) > values_done(undisturbed)
    assert folder.steps == undisturbed.steps
    assert folder.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
