"""A run with its record ends as one without: also if the record cannot be written, or the controller is killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.support.disks import fill, mounted
from tests.support.external import ExternalGroups
from tests.support.meetings import pause
from tests.support.runs import NUM_STEPS, RunFolder, started

pytestmark = pytest.mark.timeout(900)

Completed = Callable[[str, int], RunFolder]


def recorded(folder: RunFolder, split: str) -> list[int]:
    return sorted(int(file.stem) for file in folder.path.glob(f"rollouts/{split}/*.parquet"))


def test_a_run_has_a_file_per_step_and_validation_and_says_that_it_has_ended(completed: Completed) -> None:
    folder = completed("gather", 1)
    assert recorded(folder, "train") == list(range(1, NUM_STEPS + 1))
    assert recorded(folder, "val") == [0, 2, 4]
    lines = {line["step"]: line for line in folder.metrics}
    for step in recorded(folder, "train"):
        table = pq.read_table(folder.path / f"rollouts/train/{step}.parquet")
        footer = json.loads(table.schema.metadata[b"splitppo"])
        assert sum(table["score"].to_pylist()) / len(table) == pytest.approx(lines[step]["critic/score/mean"])
        assert footer["explained_variance"]["value"] == pytest.approx(lines[step]["critic/vf_explained_var"], rel=1e-4)
        assert footer["kl_coef"] == pytest.approx(lines[step]["actor/reward_kl_penalty_coeff"])
        assert all(why > 0 for why in table["why"].to_pylist())  # the budget is larger than the step
        rows = table.to_pylist()
        for name in ("new", "entropy_tokens", "clip"):
            wanted = [None if step == 1 else row["length"] for row in rows]  # the critic's warm-up
            assert [row[name] and len(row[name]) for row in rows] == wanted
        if step > 1:
            entropy, new, old, clip = (
                np.concatenate([row[name] for row in rows]) for name in ("entropy_tokens", "new", "old", "clip")
            )
            assert entropy.mean() == pytest.approx(lines[step]["actor/entropy"], rel=0.02)
            assert np.mean(old - new) == pytest.approx(lines[step]["actor/ppo_kl"], abs=2e-3)
            assert np.mean(clip & 3 > 0) == pytest.approx(lines[step]["actor/pg_clipfrac"], abs=0.02)
    live = json.loads((folder.path / "live.json").read_text())
    assert (live["phase"], live["step"], live["total_steps"]) == ("ended", NUM_STEPS, NUM_STEPS)
    assert [event["step"] for event in folder.events if event["kind"] == "step"] == list(range(1, NUM_STEPS + 1))
    assert folder.events[-1]["reason"] == "completed"


def test_a_full_disk_costs_the_record_and_nothing_else(groups: ExternalGroups, completed: Completed) -> None:
    with mounted(groups.folder.path / "rollouts", "size=64k") as disk:
        fill(disk)
        with groups.started("evaluation.dump_generations=false") as controller:
            folder = controller.complete()
        assert recorded(folder, "train") == []
    assert controller.output.count("could not be recorded") == 1
    assert "Traceback" not in controller.output
    assert folder.summary["weights_sha256"] == completed("gather", 1).summary["weights_sha256"]
    failed = [event["why"] for event in folder.events if event["kind"] == "record_failed"]
    assert len(failed) == NUM_STEPS + 3
    assert all("No space left on device" in why for why in failed)


def test_a_killed_run_goes_on_without_its_record_and_has_the_same_weights(
    groups: ExternalGroups, completed: Completed
) -> None:
    held = {"failpoints": {"controller.actor.update.begin": pause(NUM_STEPS)}}
    with started({**groups.config, "debug": held}, groups.folder.path) as first:
        first.wait_until(lambda folder: 3 in recorded(folder, "train"), "the file of step 3")
        first.wait_until(lambda folder: 2 in folder.committed_steps, "the checkpoint of step 2")
        first.signal(signal.SIGKILL)
        first.wait()
    with groups.started("tracking.rollouts.enable=false") as second:
        folder = second.complete()
    assert recorded(folder, "train") == [1, 2]
    assert folder.summary["weights_sha256"] == completed("gather", 1).summary["weights_sha256"]
    starts = [event for event in folder.events if event["kind"] == "start"]
    assert [start["resumed_at"] for start in starts] == [0, 2]
    assert starts[1]["epoch"] == starts[0]["epoch"] + 1
    assert any("tracking.rollouts.enable" in change for change in starts[1]["changes"])
    cut = next(event for event in folder.events if event["kind"] == "cut")
    assert {span[2] for span in cut["spans"]} == {3}
