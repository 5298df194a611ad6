"""Prepares take_notes' model and prompts, then starts PPO anew; arguments override cpu.yaml."""

import sys

from recipes.fresh_run import train
from recipes.take_notes.prepare import RECIPE

if __name__ == "__main__":
    train(RECIPE, sys.argv[1:])
