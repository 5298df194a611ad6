"""Decisions of a run by its validations, and a validation without a run."""

from __future__ import annotations

import json

import pytest

from tests.support.external import ExternalGroups
from tests.support.runs import EACH_STEP, SAVED, RunFolder

pytestmark = pytest.mark.timeout(900)


def test_a_run_that_gets_no_better_ends_early_and_its_policy_can_be_validated_alone(
    stopped: RunFolder, groups: ExternalGroups
) -> None:
    folder = groups.put_back(stopped)
    last = SAVED[-1] + 2  # the first validation is the best so far, the second is no better by 5
    stop = "evaluation.early_stop={metric: val/accuracy, patience: 1, min_delta: 5}"
    settings = (EACH_STEP, "evaluation.test_freq=1", "run.total_steps=20", stop)
    for _ in range(2):  # the second time there is nothing left to do
        with groups.started(*settings) as controller:
            controller.complete()
        assert "stopped early: one validation gave no better val/accuracy, which was" in controller.output
        assert folder.summary["stopped_early"] is True
        assert folder.steps == list(range(last + 1))
        assert folder.committed_steps == list(range(1, last + 1))
        assert not (folder.path / "report.png").exists()  # by tracking.report
    trained, before = folder.summary, folder.metrics
    own = (folder.path / f"rollouts/val/{last}.jsonl").read_bytes()

    with groups.started("evaluation.val_only=true", "evaluation.n=2", "evaluation.temperature=1.0") as controller:
        controller.complete()
    assert folder.summary["weights_sha256"] == trained["weights_sha256"]
    assert folder.metrics[:-1] == before[:-1]
    sampled = folder.metrics[-1]
    assert sampled["actor/lr"] == before[-1]["actor/lr"]
    assert sampled["val/accuracy"] == folder.summary["validation"]["after"]["overall"]
    assert {"val-core/letters/reward/mean@2", "val-core/letters/reward/best@2/mean"} <= sampled.keys()
    rows = [json.loads(line) for line in (folder.path / f"rollouts/val_only/{last}.jsonl").read_text().splitlines()]
    assert sum(row["score"] for row in rows) / len(rows) == pytest.approx(sampled["val/accuracy"])
    assert len(rows) == 2 * 8
    # The run itself answers once and greedily: its file stays, and its validations are not compared with this one.
    assert (folder.path / f"rollouts/val/{last}.jsonl").read_bytes() == own
    assert folder.summary["validation"]["before"] is None
