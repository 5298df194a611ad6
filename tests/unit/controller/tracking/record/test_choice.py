"""Which responses are recorded token by token: half at random in whole groups, half for a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.tracking.record.choice import Why, choose
from tests.support.recorded import record_config
from tests.support.scores import make_scores
from tests.support.seeds import shifted

NUM_ROWS, NUM_SAMPLES, LENGTH = 400, 4, 10
NEUTRAL = {name: np.zeros(NUM_ROWS) for name in ("advantage_sum", "repetition", "kl", "value_error", "mismatch")}


def chosen(*, num_tokens: int = 800, seed: int = 1, step: int = 1, scores: Any = None, **numbers: Any) -> Any:
    columns = {"length": np.full(NUM_ROWS, LENGTH), **NEUTRAL, **numbers}
    scores = make_scores(np.zeros(NUM_ROWS, np.float32)) if scores is None else scores
    budget = {"tracking__rollouts__tokens_per_step": num_tokens, "run__seed": seed}
    return choose(columns, scores, record_config(Path("run"), num_samples=NUM_SAMPLES, **budget), step)


def test_half_of_the_tokens_are_whole_groups_drawn_by_seed_and_step() -> None:
    why = chosen()
    groups = (why & Why.RANDOM > 0).reshape(-1, NUM_SAMPLES)
    assert (groups.all(axis=1) | ~groups.any(axis=1)).all()
    assert groups.sum() * LENGTH == 400
    assert (chosen() == why).all()
    assert (chosen(step=2) != why).any()
    assert (chosen(seed=2) != why).any()


def test_each_group_is_drawn_equally_often() -> None:
    drawn = sum(chosen(step=step) & Why.RANDOM > 0 for step in range(400))
    counts = np.asarray(drawn).reshape(-1, NUM_SAMPLES)[:, 0]
    assert counts.mean() == pytest.approx(40.0)
    assert counts.std() == pytest.approx(np.sqrt(400 * 0.1 * 0.9), rel=0.3)


@pytest.mark.parametrize(
    ("reason", "column"),
    [
        (Why.LONGEST, "length"),
        (Why.KL, "kl"),
        (Why.VALUE_ERROR, "value_error"),
        (Why.ADVANTAGE, "advantage_sum"),
        (Why.MISMATCH, "mismatch"),
        (Why.REPETITION, "repetition"),
    ],
)
def test_the_two_most_extreme_responses_are_recorded_with_their_reason(reason: Why, column: str) -> None:
    numbers = np.full(NUM_ROWS, 1.0 * LENGTH if column == "length" else 0.0)
    numbers[[7, 123]] = (-30.0, 20.0) if column == "advantage_sum" else (30.0, 20.0)
    why = chosen(**{column: numbers})
    assert (why[[7, 123]] & reason > 0).all()
    assert (why & reason > 0).sum() == 2


def test_scores_end_and_failures_are_reasons() -> None:
    values = np.full(NUM_ROWS, 0.5, np.float32)
    values[3], values[4] = 1.0, -1.0
    has_eos, failures = np.ones(NUM_ROWS, np.bool_), np.full(NUM_ROWS, None, np.object_)
    has_eos[5], failures[6] = False, "errors"
    why = chosen(scores=make_scores(values, has_eos=has_eos, failures=failures))
    for row, reason in ((3, Why.HIGH_SCORE), (4, Why.LOW_SCORE), (5, Why.NO_EOS), (6, Why.SCORER_FAILED)):
        assert why[row] & reason, reason
    assert [(why & reason > 0).sum() for reason in (Why.NO_EOS, Why.SCORER_FAILED)] == [1, 1]


def test_what_is_the_same_for_all_is_no_reason() -> None:
    why = chosen()
    assert {*np.unique(why)} <= {0, int(Why.RANDOM), int(Why.LONGEST), int(Why.RANDOM | Why.LONGEST)}


@pytest.mark.parametrize("num_tokens", [0, 5, 39, 40, 41, 95, 4000, 10**9])
def test_the_budget_is_never_exceeded(num_tokens: int) -> None:
    random = np.random.default_rng(shifted(0))
    numbers = {name: random.random(NUM_ROWS) for name in NEUTRAL} | {"length": random.integers(0, 20, NUM_ROWS)}
    why = chosen(num_tokens=num_tokens, **numbers)
    assert numbers["length"][why > 0].sum() <= num_tokens
    assert (why > 0).all() or num_tokens < 10**9


def test_a_group_that_is_too_long_gives_the_responses_that_fit() -> None:
    why = chosen(num_tokens=60)
    assert (why & Why.RANDOM > 0).sum() == 3
