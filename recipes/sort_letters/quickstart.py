"""The program of `make quickstart`: prepares model and prompts, then starts PPO anew; arguments override cpu.yaml.

A finished or broken run in the same folder is removed first, unless an argument asks to resume it. Nothing but a run
folder is ever removed, and no folder in which a controller is alive.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from controller.preflight import check_config
from recipes.sort_letters.prepare import prepare
from splitppo.config import ConfigError, load_config

CONFIG = Path(__file__).with_name("cpu.yaml")
FRESH_RUN = "run.resume=disable"
# The files that the controller writes first and last; a folder with other files and without these is no run folder.
RUN_FILES = ("controller.lock", "summary.json")
EXIT_BAD_INPUT = 2


def main(overrides: list[str]) -> NoReturn:
    """Prepares the quickstart and replaces this process by the controller; exit code 2 if an argument is wrong.

    Exit code 2 also if run.dir is not the folder of an earlier run.
    """
    arguments = [FRESH_RUN, *overrides]
    try:
        config = load_config(CONFIG, arguments)
        check_config(config)
        prepare()
        if config.run.resume == "disable":
            remove_run(config.run.dir)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_BAD_INPUT)
    sys.stdout.flush()
    command = [sys.executable, "-m", "controller", "--config", str(CONFIG), *arguments]
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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"run.dir: another controller is running in {folder}") from None
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
