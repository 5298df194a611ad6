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


def test_neither_the_controllers_side_nor_a_reward_loads_torch_or_a_service() -> None:
    rewards = [f"rewards.{file.stem}" for file in (ROOT / "rewards").glob("*.py") if file.stem != "__init__"]
    modules = ["controller.__main__", "controller.session", "controller.inputs", *rewards]
    assert "rewards.manager" in modules
    code = f"import sys, {', '.join(modules)}; print(*({{'torch', 'transformers', 'services'}} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []
