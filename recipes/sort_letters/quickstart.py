"""The program of `make quickstart`: prepares model and prompts, then starts PPO anew; arguments override cpu.yaml."""

import sys
from pathlib import Path

from recipes.fresh_run import train
from recipes.sort_letters.prepare import prepare

CONFIG = Path(__file__).with_name("cpu.yaml")

if __name__ == "__main__":
    train(CONFIG, prepare, sys.argv[1:])
