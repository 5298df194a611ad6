"""The shape of the code: what a newcomer reads, how long files are, what the controller's side never imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READING_LIST = re.findall(r"^\d+\. \[([\w/.]+)\]", (ROOT / "README.md").read_text(), re.MULTILINE)
GENERATED = "splitppo/v1/"
SCRIPTS = ("benchmarks", "tests")


def num_lines(file: str) -> int:
    return len((ROOT / file).read_text().splitlines())


def test_what_a_newcomer_reads_is_short() -> None:
    assert READING_LIST[0] == "controller/trainer.py"
    assert 5 <= len(READING_LIST) <= 9
    assert {file: num_lines(file) for file in READING_LIST if num_lines(file) > 300} == {}
    assert sum(map(num_lines, READING_LIST)) <= 1700


def test_the_trainer_has_the_algorithm_and_nothing_else() -> None:
    assert num_lines("controller/trainer.py") <= 150


def test_no_file_is_long() -> None:
    folders = [folder for folder in ROOT.iterdir() if (folder / "__init__.py").exists() or folder.name in SCRIPTS]
    files = [str(file.relative_to(ROOT)) for folder in folders for file in folder.rglob("*.py")]
    files = [file for file in files if not file.startswith(GENERATED)]
    assert len(files) > 100
    assert {file: num_lines(file) for file in files if num_lines(file) > 400} == {}


def test_neither_the_controllers_side_nor_a_reward_loads_torch_or_a_service() -> None:
    rewards = [f"rewards.{file.stem}" for file in (ROOT / "rewards").glob("*.py") if file.stem != "__init__"]
    modules = ["controller.__main__", "controller.session", "controller.preflight", *rewards]
    assert "rewards.manager" in modules
    code = f"import sys, {', '.join(modules)}; print(*({{'torch', 'transformers', 'services'}} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []
