"""Trains the quickstart's policy to its end, then lets it teach the one that the quickstart begins with.

    python -m recipes.sort_letters.teach [key=value ...]     # arguments override teacher.yaml

The teacher is made once, and again only if the quickstart has changed.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from recipes.fresh_run import train
from recipes.made_once import make_once
from recipes.sort_letters.prepare import RECIPE
from recipes.warm_started import WarmStarted
from splitppo.config import ConfigError

TEACHER = Path(".cache/sort_letters_teacher")


class Taught(WarmStarted):
    """The recipe with a teacher: the policy of a finished quickstart."""

    @property
    def config_file(self) -> Path:
        """The configuration of the run in which the teacher teaches."""
        return self.folder / "teacher.yaml"

    def prepare(self, *arguments: Any, **options: Any) -> None:
        """Makes the files of the recipe and, by a run of the quickstart, the teacher; ConfigError if that run fails."""
        super().prepare(*arguments, **options)
        RECIPE.prepare()
        inputs = RECIPE.config_file.read_bytes() + (RECIPE.output / "fingerprint.json").read_bytes()
        if make_once(TEACHER, {"quickstart_sha256": hashlib.sha256(inputs).hexdigest()}, _train_teacher):
            print(f"sort_letters: the teacher is trained: {TEACHER}", flush=True)


def _train_teacher(folder: Path) -> None:
    print("sort_letters: training the teacher, about 15 seconds", flush=True)
    run = folder / "run"
    overrides = (f"run.dir={run}", "checkpoint.save_hf_model=true", "tracking.trackers=[]")
    command = [sys.executable, "-m", "controller", "--config", str(RECIPE.config_file), *overrides]
    if status := subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        raise ConfigError(f"the quickstart's run, which makes the teacher, ended with exit code {status}")
    last = max(run.glob("checkpoints/global_step_*"), key=lambda step: int(step.name.rpartition("_")[2]))
    shutil.move(last / "actor" / "huggingface", folder / "model")
    shutil.rmtree(run)


TAUGHT = Taught(**vars(RECIPE))

if __name__ == "__main__":
    train(TAUGHT, sys.argv[1:])
