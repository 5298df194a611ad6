"""Starts a run anew in a folder that may hold an earlier one, for recipes that prepare all they need themselves.

A finished or broken run in the same folder is removed first, unless an argument asks to resume it. Nothing but a run
folder is ever removed, and no folder in which a controller is alive.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from controller.preflight import check_config
from recipes.warm_started import WarmStarted
from splitppo.config import ConfigError, load_config
from splitppo.file_lock import try_lock

FRESH_RUN = "run.resume=disable"
# The files that the controller writes first and last; a folder with other files and without these is no run folder.
RUN_FILES = ("controller.lock", "summary.json")
EXIT_BAD_INPUT = 2


def train(recipe: WarmStarted, overrides: Sequence[str]) -> NoReturn:
    """Prepares a recipe and replaces this process by the controller; exit code 2 if an argument is wrong.

    Exit code 2 also if run.dir is not the folder of an earlier run.

    Args:
        recipe: its cpu.yaml is the configuration of the run.
        overrides: the command line, key=value.
    """
    arguments = [FRESH_RUN, *overrides]
    if (environment := recipe.folder / "environment.py").is_file():
        # cpu.yaml has the path in a checkout; that in an installed package is another one.
        arguments.insert(0, f"rollout.multi_turn.environments.default.path={os.path.relpath(environment)}")
    try:
        config = load_config(recipe.config_file, arguments)
        check_config(config)
        recipe.prepare()
        if config.run.resume == "disable":
            remove_run(config.run.dir)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_BAD_INPUT)
    sys.stdout.flush()
    command = [sys.executable, "-m", "controller", "--config", str(recipe.config_file), *arguments]
    os.execv(sys.executable, command)  # noqa: S606 - signals and exit status are then the controller's


def remove_run(folder: Path) -> None:
    """Deletes the run folder of an earlier run, finished or not.

    Raises:
        ConfigError: the folder is not a run folder, or a controller is running in it.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not any((folder / name).is_file() for name in RUN_FILES):
        raise ConfigError(f"run.dir: {folder} is not the folder of an earlier run; remove it, or choose another")
    with (folder / "controller.lock").open("a") as lock:
        if not try_lock(lock):
            raise ConfigError(f"run.dir: another controller is running in {folder}")
        shutil.rmtree(folder)
