"""The built-in environment `gymnasium`: games with gymnasium's API that are played in text."""

import inspect
import pkgutil
import re
from collections.abc import Sequence
from typing import Any

from environments.chat import Step


class Adapter:
    """A game with gymnasium's API: its observations are the user's messages, and the model's turns its actions.

    Observations are texts, or those of a game that renders text (`render_mode: ansi`). Actions are texts; for a
    discrete space, the last of its numbers or names that a turn has without a minus sign directly before it. Thoughts,
    up to </think>, are no action.

    Args:
        id: the game, as `make` takes it, e.g. module:Game-v0.
        make: the function that makes it, as module:function.
        actions: the names of the actions of a discrete space; empty: their numbers.
        kwargs: further arguments of `make`.

    Raises:
        ValueError: observations or actions are no texts.
    """

    def __init__(self, id: str, make: str = "gymnasium:make", actions: Sequence[str] = (), **kwargs: Any) -> None:  # noqa: A002
        """Makes the game `id`; ValueError if its observations cannot be shown as text, or an action has no name."""
        if not isinstance(make, str) or ":" not in make:
            raise ValueError(f"make: expected module:function, got {make!r}")
        self._env = pkgutil.resolve_name(make)(id, **kwargs)
        shown = getattr(self._env, "observation_space", None)
        shows_text = getattr(self._env, "render_mode", None) == "ansi" in self._env.metadata["render_modes"]
        if not _is_text(shown) and not shows_text:
            raise ValueError(f"the observations of {id} are {shown}; expected texts, or a game with render_mode: ansi")
        self._actions = _by_name(id, getattr(self._env, "action_space", None), actions)
        names = "|".join(map(re.escape, sorted(self._actions, key=len, reverse=True)))
        self._names = re.compile(rf"(?<![\w.\-\u2212])(?:{names})(?!\w|\.\d)")

    def reset(self, *, seed: int, **row: Any) -> str:
        """Begins a game. One that takes `options` gets the row's fields."""
        takes_options = "options" in inspect.signature(self._env.reset).parameters
        return self._text_of(self._env.reset(seed=seed, **({"options": row} if takes_options else {}))[0])

    def step(self, text: str) -> Step:
        """Makes the move of a turn; a turn without one is told so, and changes nothing."""
        action: Any = text.rpartition("</think>")[2].strip()
        if self._actions:
            said = self._names.findall(action.lower())
            if not said:
                return Step(f"expected one of: {', '.join(self._actions)}")
            action = self._actions[said[-1]]
        observation, reward, is_terminated, is_truncated, info = self._env.step(action)
        return Step(self._text_of(observation), float(reward), bool(is_terminated or is_truncated), info)

    def close(self) -> None:
        """Frees what the game holds."""
        getattr(self._env, "close", bool)()  # GEM's have none

    check = close  # a game that can be made

    def _text_of(self, observation: Any) -> str:
        return observation if isinstance(observation, str) else str(self._env.render())


def _is_text(space: Any) -> bool:
    return space is None or type(space).__name__ == "Text"


def _by_name(game: str, space: Any, names: Sequence[str]) -> dict[str, int]:
    """Returns the actions of a discrete space by their names, in small letters; none if actions are texts."""
    if _is_text(space):
        return {}
    if type(space).__name__ != "Discrete":
        raise ValueError(f"the actions of {game} are {space}; expected Text or Discrete: wrap the game")
    numbers = range(int(space.start), int(space.start + space.n))
    said = [str(name).strip().lower() for name in names or numbers] if isinstance(names, list | tuple) else []
    if "" in said or not len({*said}) == len(said) == len(numbers):
        raise ValueError(f"actions: expected {len(numbers)} different names for {game}, got {names!r}")
    return dict(zip(said, numbers, strict=True))
