"""Limits the time of comparisons by sympy, which can take minutes for a line that a policy has learned to write.

A comparison that takes longer than its limit has given up. Only a few of the answers that are scored together may give
up; after them the others are compared by their spelling alone. The field SYMBOLIC of a result says so.
Scoring processes import this module, so it imports nothing heavy.
"""

import time
from collections.abc import Callable, Sequence
from enum import Enum

from rewards.samples import Scored

SYMBOLIC = "symbolic"
_MIN_GIVE_UPS = 2  # among the answers that are scored together
_ANSWERS_PER_GIVE_UP = 64

Comparison = Callable[[str, str], bool]


class Outcome(Enum):
    """The reason why an answer was not compared to the end, as the field SYMBOLIC and metrics name it."""

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
    """The state of this process: whether comparisons may begin, and the outcome of those of the last call."""

    may_give_up = True
    outcome: Outcome | None = None


def begin_call(*, may_give_up: bool) -> None:
    """Clears the outcome of the call before. Without `may_give_up` no comparison begins in this call."""
    _Process.may_give_up, _Process.outcome = may_give_up, None


def outcome_of_call() -> Outcome | None:
    """Returns the outcome of the comparisons since `begin_call`; None if all came to an end, or there was none."""
    return _Process.outcome


def within_budget(limit_s: float) -> Callable[[Comparison], Comparison]:
    """Decorates a comparison that gives up by itself after `limit_s`, and notes its outcome.

    The comparison returns False if it may not begin.
    """

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
