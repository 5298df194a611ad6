"""What the pages show is run: the configuration of the README, and every module that a page starts says its help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from recipes.sort_letters.prepare import RECIPE, prepare
from tests.support.doc_commands import ROOT, commands, yaml_blocks

# What has no options: it trains, or fetches, whatever it is given.
WITHOUT_HELP = frozenset(
    (
        *("recipes.sort_letters.quickstart", "recipes.sort_letters.teach", "recipes.guess_number.train"),
        *("recipes.clerk.train", "recipes.take_notes.train", "recipes.sao.train", "tools.vendor"),
    )
)
MODULES = sorted(
    {
        command.module
        for command in commands()
        if command.module is not None
        and command.module.startswith(
            ("benchmarks.", "controller", "recipes.", "services.", "splitppo.", "tools.", "viewer")
        )
        and "NAME" not in command.module
        and command.module not in WITHOUT_HELP
    }
)


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the quickstart has made its model and prompts, and the README's file is sort.yaml."""
    folder = tmp_path_factory.mktemp("newcomer")
    prepare(folder / ".cache/sort_letters", warm_start_steps=1)
    [text] = [block for page, block in yaml_blocks() if page == "README.md"]
    (folder / "sort.yaml").write_text(text)
    return folder


def test_the_file_of_the_readme_is_ten_lines_that_pass_the_check(folder: Path) -> None:
    text = (folder / "sort.yaml").read_text()
    assert len(text.splitlines()) == 10
    recipe, shown = yaml.safe_load(RECIPE.config_file.read_text()), yaml.safe_load(text)
    assert shown["data"]["train_files"] == recipe["data"]["train_files"]
    done = run_python(folder, "-m", "controller", "--config", "sort.yaml", "--check")
    assert done.returncode == 0, done.stderr


def test_the_run_of_the_readme_completes(folder: Path) -> None:
    done = run_python(folder, "-m", "controller", "--config", "sort.yaml")
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "runs/sort/summary.json").read_text())
    assert (summary["finished"], summary["global_step"]) == (True, 4)


@pytest.mark.extended
@pytest.mark.parametrize("module", MODULES)
def test_every_module_that_a_page_starts_says_its_help(tmp_path: Path, module: str) -> None:
    done = run_python(tmp_path, "-m", module, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


@pytest.mark.extended
@pytest.mark.parametrize("command", ["play", "plan", "sync", "doctor", "from-verl"])
def test_every_command_beside_training_says_its_help(tmp_path: Path, command: str) -> None:
    done = run_python(tmp_path, "-m", "controller", command, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout
