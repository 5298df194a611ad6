"""Prepares clerk's model and prompts, then starts PPO anew; arguments override cpu.yaml."""

import sys

from recipes.clerk.prepare import RECIPE
from recipes.fresh_run import train

if __name__ == "__main__":
    train(RECIPE, sys.argv[1:])
