"""Runs that several tests look at: made once, when the first test asks for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ON_TWO_RANKS, Inputs, RunFolder, started

WITHOUT_TORCH = "tests.integration.runs.controller_without_torch"


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Models, prompts and reward of every run."""
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def config(inputs: Inputs) -> dict[str, Any]:
    """The configuration of every run, without its folder."""
    return inputs.config()


@pytest.fixture(scope="session")
def completed(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], RunFolder]:
    """Makes undisturbed runs of all steps, by (schedule, num_actor_ranks). Only to be read: tests share them."""
    runs: dict[tuple[str, int], RunFolder] = {}

    def run(schedule: str, num_actor_ranks: int) -> RunFolder:
        key = (schedule, num_actor_ranks)
        if key not in runs:
            folder = tmp_path_factory.mktemp("completed") / f"{schedule}_{num_actor_ranks}"
            overrides = [f"run.schedule={schedule}", *(ON_TWO_RANKS if num_actor_ranks == 2 else ())]
            module = WITHOUT_TORCH if key == ("serial", 1) else "controller"
            with started(config, folder, *overrides, module=module) as controller:
                runs[key] = controller.complete()
        return runs[key]

    return run


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[RunFolder], RunFolder]:
    """Makes a run folder of one's own to go on in; nothing but the paths differs."""

    def copy(folder: RunFolder) -> RunFolder:
        return RunFolder(shutil.copytree(folder.path, tmp_path / folder.path.name))

    return copy
