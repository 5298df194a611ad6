"""MATH's solutions in scoring processes: against their answers, and against answers of other problems."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from rewards.manager import RewardManager
from rewards.samples import Sample
from rewards.scorers.competition_math import last_boxed
from rewards.scorers.math_equivalence import normalise
from splitppo.config import RewardConfig
from tests.support.datasets import data_file

# Its answer is a sentence that was cut out of the solution by mistake.
MISTAKEN_ANSWER = "the correct answer as we normally do, as that would be especially confusing for this problem."

# Accepted though they are spelt differently after normalisation: each was looked at.
SAME_MATHEMATICS = {
    ("-2,1", "1,-2"): "solutions have no order",
    ("1:2", r"\frac12"): "a ratio",
    (r"y = -\frac{1}{4}", r"-\frac{1}{4}"): "a named value",
    (r"\frac{2 \pi}{3}", r"\frac{2}{3}\pi"): "pi beside the fraction",
    (r"\frac{3 \pi}{4}", r"\frac{3}{4}\pi\text{ inches}"): "pi beside the fraction, and a unit",
    (r"\frac{\sqrt{6}}{3}", r"\frac{\sqrt6}3"): "the same fraction, typeset otherwise",
}


def solutions_and_answers(every: int) -> list[tuple[str, str]]:
    """Each `every`th solution with the answer of its problem, which the other file gives."""

    def rows(name: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in data_file(f"math/{name}").read_text(encoding="utf-8").splitlines()]

    answers = {row["problem"]: row["answer"] for row in rows("validation_answers_only.jsonl")}
    solutions = [(row["answer"], answers[row["question"]]) for row in rows("test.jsonl")]
    assert len(solutions) == 5000
    return solutions[::every]


async def accepted(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs of solution and answer that score 1; no call fails, takes too long or crashes."""
    samples = [Sample("lighteval/MATH", solution, answer) for solution, answer in pairs]
    async with RewardManager(RewardConfig.model_validate({}), ["lighteval/MATH"]) as manager:
        results = await manager.score(samples)
    assert [result.message for result in results if result.failure] == []
    return [pair for pair, result in zip(pairs, results, strict=True) if result.score == 1.0]


async def test_every_solution_is_right_by_its_own_answer() -> None:
    pairs = solutions_and_answers(1)
    wrong = set(pairs) - set(await accepted(pairs))
    assert [answer for _, answer in wrong] == [MISTAKEN_ANSWER]


def otherwise_spelt(pairs: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """Box and answer of those pairs that do not normalise to one string."""
    boxed = [(str(last_boxed(solution)), answer) for solution, answer in pairs]
    return {(box, answer) for box, answer in boxed if normalise(box) != normalise(answer)}


@pytest.mark.parametrize(("every", "num_equal"), [(10, 7), pytest.param(1, 44, marks=pytest.mark.extended)])
async def test_a_solution_is_right_by_the_next_problems_answer_only_if_the_answers_are_equal(
    every: int, num_equal: int
) -> None:
    rows = solutions_and_answers(every)
    pairs = [(solution, answer) for (solution, _), (_, answer) in zip(rows, rows[1:] + rows[:1], strict=True)]
    right = await accepted(pairs)
    assert len(right) == num_equal
    assert otherwise_spelt(right) == set()


@pytest.mark.extended
async def test_answers_of_the_same_characters_are_right_by_each_other_only_if_they_are_equal() -> None:
    alike = sorted({answer for _, answer in solutions_and_answers(1)}, key=lambda text: (sorted(normalise(text)), text))
    pairs = [(rf"\boxed{{{answer}}}", other) for answer, other in zip(alike, alike[1:] + alike[:1], strict=True)]
    assert otherwise_spelt(await accepted(pairs)) == set(SAME_MATHEMATICS)
