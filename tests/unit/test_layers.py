"""The shape of the code: the six files of the tour, and what the controller's side never imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOUR = (
    "proto/splitppo/v1/actor.proto",
    "controller/trainer.py",
    "controller/advantages.py",
    "services/shell/dispatcher.py",
    "services/engine/train_engine.py",
    "services/actor/engine.py",
)


@pytest.mark.parametrize("file", TOUR)
def test_the_files_that_a_newcomer_reads_are_short(file: str) -> None:
    assert 0 < len((ROOT / file).read_text().splitlines()) < 300


@pytest.mark.parametrize(
    "module", ["controller.__main__", "controller.session", "controller.inputs", "rewards.manager"]
)
def test_the_controllers_side_loads_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print(*({{'torch', 'transformers', 'services'}} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []


def test_every_reward_is_importable_without_torch() -> None:
    names = [f"rewards.{file.stem}" for file in (ROOT / "rewards").glob("*.py") if file.stem != "__init__"]
    code = f"import sys, {', '.join(names)}; print(*({{'torch', 'transformers'}} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []
