"""The program of `make quickstart`: prepares model and prompts, then starts PPO anew; arguments override cpu.yaml."""

import sys

from recipes.fresh_run import train
from recipes.sort_letters.prepare import RECIPE

if __name__ == "__main__":
    train(RECIPE, sys.argv[1:])
