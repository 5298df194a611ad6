"""The keys of programs, and what they are good for."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from environments.gateway.dialogue import Dialogue


@dataclass
class Keys:
    """The keys of an endpoint, as long as their conversations go on.

    Attributes:
        dialogues: the conversation of a key.
        rewards: what takes a reward, by keys of their own; it raises Refused if the configuration wants none.
        ignored: how often requests have set parameters that change nothing.
    """

    dialogues: dict[str, Dialogue] = field(default_factory=dict)
    rewards: dict[str, Callable[[Any], None]] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
