"""Validation metrics: worked by hand, and the bootstrap against a plain reimplementation of verl's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from controller.ppo.scores import Scores, objects
from controller.tracking.step_metrics import reward_extra_metrics
from controller.validation.metrics import accuracy_by_source, validation_metrics
from rewards.scorers import math_dapo
from splitppo.run_folder.metrics import check_declared
from tests.support.scores import make_scores


def answers(source: str, prompt: int, *fields: dict[str, Any]) -> Scores:
    """Responses to one prompt, each with its reward and the scorer's other fields."""
    return make_scores(
        np.array([extra.pop("reward") for extra in fields], np.float32),
        data_sources=objects(source for _ in fields),
        prompt_indices=np.full(len(fields), prompt),
        extra=objects(fields),
    )


def verl_bootstrap(
    values: Sequence[object], n: int, reduce: Callable[[list[object]], float], seed: int = 42
) -> tuple[float, float]:
    """1000 draws of n with replacement, as verl draws them: mean and standard deviation of what they reduce to."""
    random = np.random.RandomState(seed)
    results = []
    for _ in range(1000):
        drawn = random.choice(len(values), size=n, replace=True)
        results.append(reduce([values[index] for index in drawn]))
    return float(np.mean(results)), float(np.std(results))


def majority(votes: list[tuple[str, float]]) -> float:
    counts = Counter(pred for pred, _ in votes)
    winner = max(counts, key=lambda pred: counts[pred])
    return next(value for pred, value in votes if pred == winner)


def test_one_greedy_sample_per_prompt_gives_the_mean_per_source() -> None:
    judged = Scores.join(
        [
            answers("gsm8k", 0, {"reward": 1.0}),
            answers("gsm8k", 1, {"reward": 0.0}),
            answers("math", 0, {"reward": 1.0}),
        ]
    )
    metrics = validation_metrics(judged)
    assert metrics == {
        "val/accuracy": pytest.approx(2 / 3),
        "val-core/gsm8k/reward/mean@1": 0.5,
        "val-core/math/reward/mean@1": 1.0,
    }
    check_declared(metrics)
    accuracy = accuracy_by_source(judged)
    assert accuracy.overall == pytest.approx(2 / 3)
    assert accuracy.by_source == {"gsm8k": 0.5, "math": 1.0}


def test_a_field_that_is_too_large_counts_as_none() -> None:
    right = {"reward": 1.0, "acc": 1.0}
    judged = answers("s", 0, dict(right), {"reward": 1.0, "acc": 1e300, "big": 1e308})
    metrics = validation_metrics(judged)
    assert metrics["val/accuracy"] == metrics["val-core/s/acc/mean@2"] == 0.5
    assert not [name for name in metrics if "/big/" in name]
    assert accuracy_by_source(answers("s", 0, {"reward": 1.0, "acc": 1e300})).overall == 1.0  # the reward


def test_where_there_is_an_acc_it_counts_and_the_reward_is_auxiliary() -> None:
    judged = Scores.join(
        [
            answers("s", 0, {"reward": -1.0, "acc": False}),
            answers("s", 1, {"reward": 2.0, "acc": True}),
        ]
    )
    metrics = validation_metrics(judged)
    assert metrics["val-core/s/acc/mean@1"] == 0.5
    assert metrics["val-aux/s/reward/mean@1"] == 0.5
    assert accuracy_by_source(judged).overall == 0.5


def test_dapos_fields_become_metrics_and_its_preds_vote() -> None:
    responses = ["Answer: 7", "Answer: 5", "Answer: 7", "seven"]
    scored = [math_dapo.compute_score("aime2024", response, "7") for response in responses]
    judged = answers("aime2024", 0, *({"reward": fields.pop("score"), **fields} for fields in scored))
    metrics = validation_metrics(judged)
    assert metrics["val-core/aime2024/acc/mean@4"] == metrics["val/accuracy"] == 0.5
    assert metrics["val-aux/aime2024/reward/mean@4"] == 0.0
    assert metrics["val-core/aime2024/acc/maj@4/mean"] > 0.5
    assert "val-aux/aime2024/acc/maj@4/mean" not in metrics
    in_training = reward_extra_metrics(judged.extra_columns)
    assert in_training == {"reward_extra/acc/mean": 0.5, "reward_extra/acc/max": 1.0, "reward_extra/acc/min": 0.0}
    check_declared(metrics | in_training)


def test_a_failed_scorer_counts_as_wrong_also_where_it_left_no_acc() -> None:
    judged = Scores.join([answers("s", 0, {"reward": 0.0}), answers("s", 1, {"reward": 1.0, "acc": True})])
    assert accuracy_by_source(judged).overall == 0.5
    assert validation_metrics(judged)["val-core/s/acc/mean@1"] == 0.5


def test_best_worst_and_majority_equal_verls_bootstrap() -> None:
    values = [0.0, 1.0, 0.0, 0.5, 1.0]
    preds = ["x", "y", "x", "z", "y"]
    metrics = validation_metrics(
        answers("s", 0, *({"reward": value, "pred": pred} for value, pred in zip(values, preds, strict=True)))
    )
    assert metrics["val-core/s/reward/mean@5"] == 0.5
    assert metrics["val-aux/s/reward/std@5"] == pytest.approx(np.std(values))
    for n in (2, 4, 5):
        figures = {
            "best": verl_bootstrap(values, n, max),
            "worst": verl_bootstrap(values, n, min),
            "maj": verl_bootstrap(list(zip(preds, values, strict=True)), n, majority),
        }
        for kind, (mean, std) in figures.items():
            section = "val-core" if n == 5 and kind != "worst" else "val-aux"  # as in verl
            assert metrics[f"{section}/s/reward/{kind}@{n}/mean"] == pytest.approx(mean)
            assert metrics[f"{section}/s/reward/{kind}@{n}/std"] == pytest.approx(std)
    assert not any("@3" in name for name in metrics)
    check_declared(metrics)


@pytest.mark.parametrize("num_samples", [2, 6, 16])
def test_best_and_worst_are_within_the_bootstraps_error_of_what_is_expected(num_samples: int) -> None:
    """The largest of n draws from N sorted values is the i-th with probability (i^n - (i - 1)^n) / N^n."""
    values = np.random.default_rng(num_samples).normal(size=num_samples)
    metrics = validation_metrics(answers("s", 0, *({"reward": float(value)} for value in values)))
    ns = [int(name.split("@")[1].split("/")[0]) for name in metrics if "/best@" in name and name.endswith("mean")]
    assert ns == sorted({*[n for n in (2, 4, 8, 16) if n <= num_samples], num_samples})
    places = np.arange(1, num_samples + 1)
    for n in ns:
        probability = (places ** float(n) - (places - 1) ** float(n)) / num_samples**n
        for kind, ordered in (("best", np.sort(values)), ("worst", np.sort(values)[::-1])):
            mean = (probability * ordered).sum()
            std = np.sqrt((probability * (ordered - mean) ** 2).sum())
            name = f"{'val-core' if n == num_samples and kind == 'best' else 'val-aux'}/s/reward/{kind}@{n}"
            found = metrics[f"{name}/mean"], metrics[f"{name}/std"]
            assert abs(found[0] - mean) < 5 * std / np.sqrt(1000)
            assert found[1] == pytest.approx(std, rel=0.2)


def test_figures_are_taken_per_prompt_and_then_averaged() -> None:
    metrics = validation_metrics(
        Scores.join(
            [
                answers("s", 0, {"reward": 1.0}, {"reward": 1.0}),
                answers("s", 1, {"reward": 0.0}, {"reward": 0.0}),
            ]
        )
    )
    assert metrics["val-core/s/reward/best@2/mean"] == 0.5
    assert metrics["val-aux/s/reward/std@2"] == 0.0


def test_without_preds_there_is_no_majority() -> None:
    metrics = validation_metrics(answers("s", 0, {"reward": 1.0}, {"reward": 0.0}))
    assert not any("maj" in name for name in metrics)


def test_text_fields_are_no_metrics() -> None:
    metrics = validation_metrics(answers("s", 0, {"reward": 1.0, "comment": "fine"}))
    assert not any("comment" in name for name in metrics)


def test_a_field_that_a_scorer_left_empty_is_no_answer() -> None:
    metrics = validation_metrics(answers("s", 0, {"reward": 1.0, "acc": None, "pred": None}))
    assert set(metrics) == {"val/accuracy", "val-core/s/reward/mean@1"}


def test_a_validation_without_responses_is_refused() -> None:
    with pytest.raises(ValueError, match="without any response"):
        accuracy_by_source(make_scores(np.empty(0, np.float32)))
