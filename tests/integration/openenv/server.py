"""A server with a game of OpenEnv's kind, for the Python that has OpenEnv: python server.py PORT."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str
    loudness: int = 1


class Told(Observation):
    text: str
    turn: int


class Parrot(Environment[Say, Told, State]):
    """Tells the letters of the row and the seed, then the number of each turn; the third is the last."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, ground_truth: str = "", **_: Any) -> Told:
        self._turn = 0
        return Told(text=f" {ground_truth}{(seed or 0) % 10}", turn=0)

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Told:
        if action.message == "break":
            raise RuntimeError("it is broken")
        self._turn += 1
        reward = action.loudness * len(action.message) / 16
        return Told(text=str(self._turn), turn=self._turn, reward=reward, done=self._turn == 3)

    @property
    def state(self) -> State:
        return State(step_count=self._turn)


if __name__ == "__main__":
    app = create_fastapi_app(Parrot, Say, Told, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
