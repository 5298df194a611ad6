"""Bounds on comparisons by sympy, which can take minutes for a line that a policy has learned to write.

One that takes longer than its limit has given up. Of the answers that are scored together only a few may; after them
the others are compared by their spelling alone. What happened to an answer stands in the field SYMBOLIC of its scores.
Imported by the scoring processes, so it stays light.
"""

import time
from collections.abc import Callable, Sequence
from enum import Enum

from rewards.samples import Scored

SYMBOLIC = "symbolic"
_MIN_GIVE_UPS = 2  # of the answers that are scored together
_ANSWERS_PER_GIVE_UP = 64

Comparison = Callable[[str, str], bool]


class Outcome(Enum):
    """Why an answer was not compared to the end, as the field SYMBOLIC and metrics name it."""

    GAVE_UP = "gave_up"
    SKIPPED = "skipped"


class SymbolicBudget:
    """The number of comparisons that may still give up (`num_left`) among answers that are scored together."""

    def __init__(self, num_answers: int) -> None:
        self.num_left = max(_MIN_GIVE_UPS, num_answers // _ANSWERS_PER_GIVE_UP)

    def take(self, results: Sequence[Scored]) -> None:
        """Subtracts the comparisons that gave up."""
        self.num_left -= sum(scored.extra.get(SYMBOLIC) == Outcome.GAVE_UP.value for scored in results)


class _Process:
    """State of the process: whether comparisons are made, and what became of the last call's."""

    may_give_up = True
    outcome: Outcome | None = None


def begin_call(*, may_give_up: bool) -> None:
    """Forgets the call before; without `may_give_up` no comparison is begun."""
    _Process.may_give_up, _Process.outcome = may_give_up, None


def outcome_of_call() -> Outcome | None:
    """Returns why comparisons since `begin_call` were not made to the end; None: they were, or none was asked for."""
    return _Process.outcome


def within_budget(limit_s: float) -> Callable[[Comparison], Comparison]:
    """Decorates a comparison that gives up by itself after `limit_s`: False where it did, or is not begun."""

    def decorate(compare: Comparison) -> Comparison:
        def compare_within_budget(answer: str, truth: str) -> bool:
            if not _Process.may_give_up:
                _Process.outcome = Outcome.SKIPPED
                return False
            started = time.monotonic()
            is_same = compare(answer, truth)
            if time.monotonic() - started >= limit_s:
                _Process.outcome = Outcome.GAVE_UP
            return is_same

        return compare_within_budget

    return decorate
