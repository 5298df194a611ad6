"""The recipe clerk, by its command: runs that must learn what is asked for, from a reward for each turn."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from recipes.clerk import task
from tests.support.recipes import trained
from tests.support.runs import RunFolder

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

NUM_STEPS = 4
ANY = "evaluation.min_accuracy=0"


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The first steps of the recipe."""
    overrides = (f"run.total_steps={NUM_STEPS}", ANY, "tracking.dump_rollouts=true")
    return trained("clerk", tmp_path_factory.mktemp("short") / "run", *overrides)


def test_more_requests_are_answered_rightly_after_a_few_steps(short: RunFolder) -> None:
    validation = short.summary["validation"]
    assert validation["after"]["overall"] >= validation["before"]["overall"] + 0.1


def test_every_conversation_has_sixteen_turns_of_a_letter(short: RunFolder) -> None:
    for step in short.metrics[1:]:
        assert step["num_turns/mean"] > 0.95 * task.NUM_REQUESTS
        assert step["num_turns/max"] == task.NUM_REQUESTS
        assert (step["environment/num_lost"], step["environment/num_timeouts"]) == (0, 0)


def test_each_reward_is_that_of_the_answer_of_its_turn(short: RunFolder) -> None:
    rows = [json.loads(line) for line in (short.path / f"rollouts/train/{NUM_STEPS}.jsonl").read_text().splitlines()]
    for row in rows:
        card = row["ground_truth"]
        said = [message["content"] for message in row["messages"]]
        # The first request is part of the prompt.
        asked = [row["prompt"].split(card)[1][:5], *said[1::2]]
        answered = list(zip(asked, said[::2], strict=True))
        right = [answer.removesuffix("<|im_end|>") == card[task.RIGHT[request]] for request, answer in answered]
        assert row["turn_scores"] == [is_right / task.NUM_REQUESTS for is_right in right]
        assert row["score"] == pytest.approx(sum(row["turn_scores"]))


def test_the_median_of_three_seeds_answers_at_least_85_of_100_requests(tmp_path: Path) -> None:
    runs = [trained("clerk", tmp_path / str(seed), f"run.seed={seed}", ANY) for seed in (1, 2, 3)]
    accuracies = [run.summary["validation"]["after"]["overall"] for run in runs]
    assert median(accuracies) >= 0.85, accuracies
