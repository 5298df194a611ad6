"""Prepares guess_number's model and prompts, then starts SAO anew; arguments override cpu.yaml."""

import sys
from pathlib import Path

from recipes.fresh_run import train
from recipes.guess_number.prepare import RECIPE
from recipes.warm_started import WarmStarted


class Sao(WarmStarted):
    """guess_number, with SAO's configuration."""

    @property
    def config_file(self) -> Path:
        """The configuration of SAO."""
        return Path(__file__).parent / "cpu.yaml"


SAO = Sao(**vars(RECIPE))

if __name__ == "__main__":
    train(SAO, sys.argv[1:])
