"""Recipes that prepare all they need themselves: whole runs by their commands, and what their configurations name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recipes.warm_started import WarmStarted
from splitppo.config import Config
from tests.support.groups import PROJECT
from tests.support.runs import RunFolder


def trained(recipe: str, folder: Path, *overrides: str) -> RunFolder:
    """Runs `python -m recipes.RECIPE.train` to its end."""
    command = [sys.executable, "-m", f"recipes.{recipe}.train", f"run.dir={folder}", *overrides]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return RunFolder(folder)


def names_its_files(config: Config, recipe: WarmStarted, data_source: str) -> None:
    """Asserts that a configuration reads what the recipe makes, and has an environment of its own."""
    assert {config.actor.model, *config.data.train_files, *config.data.val_files} == {
        str(recipe.output / name) for name in ("model", "train.parquet", "val.parquet")
    }
    environment = config.rollout.multi_turn.environment_of(data_source)
    assert environment is not None
    assert environment.path is not None
    assert (PROJECT / environment.path).is_file()


def is_made_by_its_seed(prepare: Callable[..., Any], prepared: Path, folder: Path, files: Sequence[str]) -> None:
    """Asserts that what `prepare` makes with one step of the warm start is as in `prepared`, by its seed alone."""
    prepare(folder / "again", warm_start_steps=1)
    prepare(folder / "other", warm_start_steps=1, seed=1)
    for name in ("model/model.safetensors", *files):
        original = (prepared / name).read_bytes()
        assert (folder / "again" / name).read_bytes() == original, name
        assert (folder / "other" / name).read_bytes() != original, name
