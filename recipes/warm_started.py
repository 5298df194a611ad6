"""Prepares recipes for a CPU that make all they need themselves: prompts, tokenizer, and a warm-started model."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recipes.made_once import code_fingerprint, make_once

_FOLDER = Path(__file__).parent
# The code that all of these recipes are made by.
_SHARED = tuple(_FOLDER / name for name in ("qwen2_tokenizer.py", "rows.py", "warm_start.py"))


@dataclass(frozen=True)
class WarmStarted:
    """A recipe whose prompts and warm-started model are a function of a seed and of its own code.

    Attributes:
        name: the name of the recipe.
        code: the files, in the folder of the recipe, that the result depends on.
        num_steps: the supervised steps of the warm start, by default.
        make: fills a folder, by a seed and a number of supervised steps.
    """

    name: str
    code: tuple[str, ...]
    num_steps: int
    make: Callable[[Path, int, int], None]

    @property
    def folder(self) -> Path:
        """The folder of the recipe's code."""
        return _FOLDER / self.name

    @property
    def config_file(self) -> Path:
        """The configuration of the recipe."""
        return self.folder / "cpu.yaml"

    @property
    def output(self) -> Path:
        """The folder that the files are written to by default."""
        return Path(".cache") / self.name

    def prepare(self, output: Path | None = None, *, seed: int = 0, warm_start_steps: int | None = None) -> None:
        """Makes the files of the recipe in `output`, unless they are there.

        Several processes may call this function at the same time.
        """
        started = time.monotonic()
        folder = output or self.output
        num_steps = self.num_steps if warm_start_steps is None else warm_start_steps
        code = code_fingerprint(*(self.folder / name for name in self.code), *_SHARED)
        wanted = {"seed": seed, "warm_start_steps": num_steps, **code}
        if make_once(folder, wanted, lambda unfinished: self.make(unfinished, seed, num_steps)):
            print(f"{self.name}: model and prompts made in {time.monotonic() - started:.0f} s: {folder}", flush=True)
        else:
            print(f"{self.name}: model and prompts are ready in {folder}", flush=True)

    def main(self, description: str | None) -> None:
        """Parses the command line and prepares the recipe."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--output", type=Path, default=self.output)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--warm-start-steps", type=int, default=self.num_steps)
        self.prepare(**vars(parser.parse_args()))
