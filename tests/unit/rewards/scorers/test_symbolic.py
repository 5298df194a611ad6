"""Comparisons by sympy that give up are counted, and after a few of them no more are made."""

from __future__ import annotations

import pytest

from rewards.scorers.math_equivalence import is_equivalent_by_math_verify
from rewards.scorers.symbolic import Outcome, begin_call, outcome_of_call


@pytest.mark.extended  # math-verify takes 5 s to give up
def test_what_math_verify_gives_up_on_is_noticed() -> None:
    begin_call(may_give_up=True)
    assert not is_equivalent_by_math_verify("(x+1)^{300}(x+2)^{300}(y+z)^{200}", "x^2+y+z")
    assert outcome_of_call() is Outcome.GAVE_UP


def test_what_is_spared_is_not_equal_and_noticed_until_the_next_call() -> None:
    begin_call(may_give_up=False)
    assert not is_equivalent_by_math_verify(r"\frac{1}{2}", r"\frac{2}{4}")
    assert outcome_of_call() is Outcome.SKIPPED
    begin_call(may_give_up=True)
    assert is_equivalent_by_math_verify(r"\frac{1}{2}", r"\frac{2}{4}")
    assert outcome_of_call() is None
