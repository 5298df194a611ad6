"""The time of the built-in scorers grows with the length of a response, whatever it repeats."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rewards.scorers
from benchmarks.scorers import MARKS

LIMIT_S = 2  # of CPU time; a rule that looks back and forth takes 8 s and more


def test_every_scorer_is_tried() -> None:
    (folder,) = rewards.scorers.__path__
    modules = {path.stem for path in Path(folder).glob("*.py") if "\ndef compute_score(" in path.read_text()}
    assert modules == set(MARKS) - {"math_equivalence"}  # a part of two scorers


@pytest.mark.slow
def test_no_repeated_marks_of_128_kb_keep_a_scorer_busy() -> None:
    command = [sys.executable, "-m", "benchmarks.scorers", "--limit-s", str(LIMIT_S)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    last_response = finished.stdout[-200:]
    assert finished.returncode == 0, f"{last_response}\n{finished.stderr[-1000:]}"
