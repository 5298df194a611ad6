"""A listener of rollout engines that writes down what it hears."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.actor.rollout.protocol import PromptRows, Rollout
from splitppo.batch import Array


@dataclass
class RecordingListener:
    """See `services.actor.rollout.protocol.Listener`.

    Attributes:
        cancel_after: is cancelled once that many progress calls have come; None: never.
        calls: (done, total) of every progress call.
        groups: (group, rollout) in the order in which groups ended.
        calls_before_group: for each ended group, the progress calls that came before.
    """

    cancel_after: int | None = None
    calls: list[tuple[int, int]] = field(default_factory=list)
    groups: list[tuple[int, Rollout]] = field(default_factory=list)
    calls_before_group: dict[int, int] = field(default_factory=dict)

    def progress(self, done: int, total: int) -> None:
        self.calls.append((done, total))

    def group_ended(self, group: int, rollout: Rollout) -> None:
        assert group not in self.calls_before_group, f"group {group} ended twice"
        self.groups.append((group, rollout))
        self.calls_before_group[group] = len(self.calls)

    @property
    def is_cancelled(self) -> bool:
        return self.cancel_after is not None and len(self.calls) >= self.cancel_after


def prompt_rows(prompts: list[Array], seeds: list[Array], groups: list[int] | None = None) -> PromptRows:
    """Rows of one group unless `groups` says otherwise."""
    return PromptRows(prompts, seeds, np.array([0] * len(prompts) if groups is None else groups, np.int64))
