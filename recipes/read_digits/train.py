"""Prepares read_digits' model and images, then starts PPO anew; arguments override cpu.yaml."""

import sys

from recipes.fresh_run import train
from recipes.read_digits.prepare import RECIPE

if __name__ == "__main__":
    train(RECIPE, sys.argv[1:])
