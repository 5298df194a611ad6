"""The exit status of the quickstart says if it has learned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.groups import PROJECT

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]


def test_a_run_that_stays_under_min_accuracy_is_completed_and_exits_with_1(tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path / 'run'}", "run.total_steps=1", "evaluation.min_accuracy=0.99"]
    ended = subprocess.run(
        [sys.executable, "-m", "recipes.sort_letters.quickstart", *overrides],
        cwd=PROJECT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    reached = f"{summary['validation']['after']['overall']:.3f}"
    assert error == f"error: the final accuracy is {reached}, expected evaluation.min_accuracy (0.99) or more"
    assert (summary["exit_reason"], summary["global_step"]) == ("completed", 1)
