"""Limits the time of comparisons by sympy, which can take minutes for one line of a response.

A comparison that reaches its time limit gives up. Only a few comparisons of a batch may give up; after them the other
answers are compared by their spelling alone. The field SYMBOLIC of a result shows which of the two happened. Scoring
processes import this module, so it imports nothing heavy.
"""

import time
from collections.abc import Callable, Sequence
from enum import Enum

from rewards.samples import Scored

SYMBOLIC = "symbolic"
_MIN_GIVE_UPS = 2  # among the answers that are scored together
_ANSWERS_PER_GIVE_UP = 64

Comparison = Callable[[str, str], bool]


class SymbolicOutcome(Enum):
    """The reason why sympy did not finish a comparison of an answer, as the field SYMBOLIC and metrics spell it."""

    GAVE_UP = "gave_up"
    SKIPPED = "skipped"


class SymbolicBudget:
    """Counts how many comparisons by sympy may still give up in one batch of answers (`num_left`)."""

    def __init__(self, num_answers: int) -> None:
        self.num_left = max(_MIN_GIVE_UPS, num_answers // _ANSWERS_PER_GIVE_UP)

    def take(self, results: Sequence[Scored]) -> None:
        """Subtracts the number of results whose comparison by sympy gave up from `num_left`."""
        self.num_left -= sum(scored.extra.get(SYMBOLIC) == SymbolicOutcome.GAVE_UP.value for scored in results)


class _Process:
    """Stores for this process if sympy comparisons may begin, and which outcome they had in the current scorer call."""

    may_give_up = True
    outcome: SymbolicOutcome | None = None


def begin_call(*, may_give_up: bool) -> None:
    """Begins a scorer's call: clears the outcome of sympy comparisons, and sets whether they may begin in this call."""
    _Process.may_give_up = may_give_up
    _Process.outcome = None


def outcome_of_call() -> SymbolicOutcome | None:
    """Returns the outcome of sympy comparisons since `begin_call`; None if all came to an end, or there was none."""
    return _Process.outcome


def within_budget(limit_s: float) -> Callable[[Comparison], Comparison]:
    """Decorates a sympy comparison with its own time limit, to skip it when none may begin, and record if it gave up.

    The comparison ends by itself after `limit_s` seconds. A skipped comparison returns False.
    """

    def decorate(compare: Comparison) -> Comparison:
        def compare_within_budget(answer: str, truth: str) -> bool:
            if not _Process.may_give_up:
                _Process.outcome = SymbolicOutcome.SKIPPED
                return False
            started = time.monotonic()
            is_same = compare(answer, truth)
            if time.monotonic() - started >= limit_s:
                _Process.outcome = SymbolicOutcome.GAVE_UP
            return is_same

        return compare_within_budget

    return decorate
