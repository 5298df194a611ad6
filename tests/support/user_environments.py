"""Environments as a user writes them, for tests of runs; a run names this file in its configuration."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from environments.chat import Step, ToolCall
from environments.messages import Schemas


def lookup(key: str) -> str:
    """Looks a word up.

    Args:
        key: the word.
    """
    return key[::-1]


def look_up_everything(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Reads every turn as a call of a tool `lookup`: a parser."""
    return "", [ToolCall("lookup", {"key": text})]


class Game:
    """Says the text of a turn again, for ever."""

    def reset(self) -> None:
        pass

    def step(self, text: str) -> str:
        return text


class Riddle:
    """Has a tool."""

    def reset(self) -> None:
        pass

    def guess(self, word: str) -> str:
        """Guesses a word.

        Args:
            word: the word.
        """
        return word


class Echo:
    """Begins with a number, says another one after each turn and gives a reward for it; takes its time, at random.

    Args:
        turns: the number of turns.
        max_pause_s: the longest time that an answer takes.
        kills: a file; the process is killed in a second turn, unless the file is there.
        fails: in this share of the conversations `step` raises.
    """

    def __init__(self, turns: int = 3, max_pause_s: float = 0.0, kills: str = "", fails: float = 0.0) -> None:
        self._turns, self._max_pause_s, self._kills, self._fails = turns, max_pause_s, kills, fails

    def reset(self, *, seed: int, **row: Any) -> str | None:
        self._draws, self._number = random.Random(seed), 0
        self._letters = row["ground_truth"]
        return f" {self._draws.randrange(10)}" if self._turns > 1 else None

    def step(self, text: str) -> Step:
        self._number += 1
        time.sleep(random.uniform(0.0, self._max_pause_s))
        if self._kills and self._number == 2 and not Path(self._kills).exists():
            Path(self._kills).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._draws.random() < self._fails:
            raise ValueError("the game is broken")
        reward = sum(letter in self._letters for letter in text) / 16 if self._turns > 1 else 0.0
        return Step(f"{self._draws.randrange(100)}", reward=reward, done=self._number == self._turns)


class Dice(Echo):
    """An `Echo` whose numbers and rewards come from a clock and from the machine's random numbers.

    Args:
        asked: a file that gets a line whenever one begins.
        others: those of an `Echo`.
    """

    def __init__(self, asked: str = "", **others: Any) -> None:
        super().__init__(**others)
        self._asked = asked

    def reset(self, *, seed: int, **row: Any) -> str | None:
        if self._asked:
            with Path(self._asked).open("a") as file:
                file.write(f"{seed}\n")
        return super().reset(seed=time.time_ns() ^ random.SystemRandom().getrandbits(60), **row)

    def step(self, text: str) -> Step:
        step = super().step(text)
        return replace(step, reward=step.reward + self._draws.random() / 4)


class Oracle(Dice):
    """A `Dice` that draws one number more, for the critic alone."""

    def privileged(self) -> dict[str, int]:
        return {"drawn": self._draws.randrange(1000)}
