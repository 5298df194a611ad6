"""Validation figures: worked by hand, and the bootstrap against a plain reimplementation of verl's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from controller.metrics import check_declared
from controller.validation_metrics import Outcome, accuracy_by_source, validation_metrics
from rewards.manager import ScoreResult


def outcomes(source: str, prompt: str, *samples: dict[str, object]) -> list[Outcome]:
    return [Outcome(source, prompt, sample) for sample in samples]


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
    judged = [
        *outcomes("gsm8k", "a", {"reward": 1.0}),
        *outcomes("gsm8k", "b", {"reward": 0.0}),
        *outcomes("math", "a", {"reward": 1.0}),
    ]
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


def test_where_there_is_an_acc_it_counts_and_the_reward_is_auxiliary() -> None:
    judged = [
        *outcomes("s", "a", {"reward": -1.0, "acc": False}),
        *outcomes("s", "b", {"reward": 2.0, "acc": True}),
    ]
    metrics = validation_metrics(judged)
    assert metrics["val-core/s/acc/mean@1"] == 0.5
    assert metrics["val-aux/s/reward/mean@1"] == 0.5
    assert accuracy_by_source(judged).overall == 0.5


def test_a_failed_scorer_counts_as_wrong_also_where_it_left_no_acc() -> None:
    judged = [*outcomes("s", "a", {"reward": 0.0}), *outcomes("s", "b", {"reward": 1.0, "acc": True})]
    assert accuracy_by_source(judged).overall == 0.5
    assert validation_metrics(judged)["val-core/s/acc/mean@1"] == 0.5


def test_best_worst_and_majority_equal_verls_bootstrap() -> None:
    values = [0.0, 1.0, 0.0, 0.5, 1.0]
    preds = ["x", "y", "x", "z", "y"]
    metrics = validation_metrics(
        outcomes("s", "p", *({"reward": value, "pred": pred} for value, pred in zip(values, preds, strict=True)))
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
            assert metrics[f"val-aux/s/reward/{kind}@{n}/mean"] == pytest.approx(mean)
            assert metrics[f"val-aux/s/reward/{kind}@{n}/std"] == pytest.approx(std)
    assert not any("@3" in name for name in metrics)
    check_declared(metrics)


def test_figures_are_taken_per_prompt_and_then_averaged() -> None:
    metrics = validation_metrics(
        [
            *outcomes("s", "a", {"reward": 1.0}, {"reward": 1.0}),
            *outcomes("s", "b", {"reward": 0.0}, {"reward": 0.0}),
        ]
    )
    assert metrics["val-aux/s/reward/best@2/mean"] == 0.5
    assert metrics["val-aux/s/reward/std@2"] == 0.0


def test_without_preds_there_is_no_majority() -> None:
    metrics = validation_metrics(outcomes("s", "a", {"reward": 1.0}, {"reward": 0.0}))
    assert not any("maj" in name for name in metrics)


def test_text_fields_are_no_metrics() -> None:
    metrics = validation_metrics(outcomes("s", "a", {"reward": 1.0, "comment": "fine"}))
    assert not any("comment" in name for name in metrics)


def test_an_outcome_takes_its_row_of_a_score_result() -> None:
    result = ScoreResult(np.array([0.0, 1.0], np.float32), {"acc": [None, True], "pred": ["a", None]}, 0, 0, 0)
    assert Outcome.of("s", 0, result, 0).variables == {"reward": 0.0, "pred": "a"}
    assert Outcome.of("s", 1, result, 1).variables == {"reward": 1.0, "acc": True}


def test_a_validation_without_responses_is_refused() -> None:
    with pytest.raises(ValueError, match="without any response"):
        accuracy_by_source([])
