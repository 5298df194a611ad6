"""Comparisons by sympy that give up are counted, and after a few of them no more are made."""

from __future__ import annotations

from rewards.scorers.math_equivalence import is_equivalent_by_math_verify
from rewards.scorers.symbolic import SymbolicOutcome, begin_call, outcome_of_call, within_budget


def test_a_comparison_that_reaches_its_limit_is_noticed() -> None:
    begin_call(may_give_up=True)
    assert not within_budget(0.0)(lambda *_: False)("5", "6")
    assert outcome_of_call() is SymbolicOutcome.GAVE_UP


def test_what_is_spared_is_not_equal_and_noticed_until_the_next_call() -> None:
    begin_call(may_give_up=False)
    assert not is_equivalent_by_math_verify(r"\frac{1}{2}", r"\frac{2}{4}")
    assert outcome_of_call() is SymbolicOutcome.SKIPPED
    begin_call(may_give_up=True)
    assert is_equivalent_by_math_verify(r"\frac{1}{2}", r"\frac{2}{4}")
    assert outcome_of_call() is None
