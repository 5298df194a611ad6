"""A text game of gymnasium, which tests name by this module: tests.support.text_game:Letters-v0."""

from __future__ import annotations

import string
from typing import Any

import gymnasium
from gymnasium.spaces import Text

NUM_TURNS = 3


class Letters(gymnasium.Env[str, str]):
    """Tells a number, at first with the letters of the row; a turn is rewarded for its length, three turns at most."""

    observation_space = Text(100, charset=string.printable)
    action_space = Text(100, charset=string.printable)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f" {(options or {}).get('ground_truth', '')}{self.np_random.integers(10)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        is_over = action == "stop"
        return str(self.np_random.integers(100)), len(action) / 16, is_over, False, {"length": len(action)}


gymnasium.register("Letters-v0", Letters, max_episode_steps=NUM_TURNS)
