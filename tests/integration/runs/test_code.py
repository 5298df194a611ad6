"""A whole run whose responses are run as programs; most of the policy's text is not even Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rewards.code.limits import Limit
from tests.support.external import ExternalGroups
from tests.support.runs import Inputs

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]
SILENT = {"inputs": [""], "outputs": [""]}


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_run_whose_scores_come_from_sandboxes_trains_to_its_end_and_leaves_none(
    groups: ExternalGroups, inputs: Inputs, tmp_path: Path
) -> None:
    files = []
    for name in ("train", "val"):
        rows = [json.loads(line) for line in (inputs.folder / f"{name}.jsonl").read_text().splitlines()]
        rows = [{**row, "reward_model": {"style": "rule", "ground_truth": json.dumps(SILENT)}} for row in rows]
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(f"data.{name}_files={file}")
    with groups.started("reward.scorers={letters: [{name: code}]}", "run.total_steps=2", *files) as run:
        folder = run.complete()
        run.wait_nothing_is_left()
    lines = [line for line in folder.metrics if "reward/num_crashes" in line]
    assert [line["training/global_step"] for line in lines] == [1, 2]
    for line in lines:
        assert {name for name in line if name.startswith("reward/code_over_")} == {
            f"reward/code_over_{limit.value}" for limit in Limit
        }
        assert (line["reward/num_crashes"], line["reward/num_errors"]) == (0, 0)
