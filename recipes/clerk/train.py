"""Prepares clerk's model and prompts, then starts PPO anew; arguments override cpu.yaml."""

import os
import sys
from pathlib import Path

from recipes.clerk.prepare import prepare
from recipes.fresh_run import train

CONFIG, ENVIRONMENT = (Path(__file__).with_name(name) for name in ("cpu.yaml", "environment.py"))

if __name__ == "__main__":
    # cpu.yaml has the path in a checkout; that in an installed package is another one.
    path = f"rollout.multi_turn.environments.default.path={os.path.relpath(ENVIRONMENT)}"
    train(CONFIG, prepare, [path, *sys.argv[1:]])
