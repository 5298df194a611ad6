"""The footer of a step: histograms, positions, calibration, and how sure the explained variance is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from controller.tracking.record.statistics import auc, explained_variance, step_statistics
from controller.tracking.record.step_tokens import StepTokens
from controller.tracking.step_metrics import learning_metrics
from splitppo.run_folder.histogram import histogram
from tests.support.recorded import random_experience, record_config
from tests.support.seeds import shifted


def test_a_histogram_counts_every_finite_value_and_reaches_to_the_extremes() -> None:
    values = np.concatenate([np.random.default_rng(shifted(0)).standard_normal(5000), [1e6, -1e6, np.nan, np.inf]])
    found = histogram(values)
    assert sum(found["counts"]) == 5002
    assert len(found["counts"]) == 48
    assert found["edges"] == sorted(found["edges"])
    assert (found["edges"][0], found["edges"][-1]) == (-1e6, 1e6)
    assert found["edges"][1:-1] == pytest.approx(
        np.linspace(found["edges"][1], found["edges"][-2], 47).tolist(), abs=1e-6
    )
    of_all = np.quantile(values[np.isfinite(values)], (0.01, 0.1, 0.5, 0.9, 0.99))
    assert found["quantiles"] == pytest.approx(of_all.tolist(), abs=1e-6)
    assert max(found["counts"]) < 1000  # the two extremes have not made one bin of all others


@pytest.mark.parametrize("values", [[3.0], [2.0] * 50, [0.0] * 5000 + [1.0]])
def test_a_histogram_of_few_different_values_counts_all(values: list[float]) -> None:
    found = histogram(np.array(values, np.float32))
    assert sum(found["counts"]) == len(values)
    assert found["edges"][0] <= min(values) <= max(values) <= found["edges"][-1]


def test_the_statistics_of_a_step_agree_with_float64_sums_over_its_tokens(tmp_path: Path) -> None:
    experience, scores = random_experience(record_config(tmp_path), [16, 3, 0, 40, 5])
    tokens = StepTokens.of(experience)
    found = step_statistics(tokens, scores.scores)
    values, returns, old, ref = (
        experience.batch[name].values.astype(np.float64)
        for name in ("values", "returns", "old_log_probs", "ref_log_probs")
    )
    assert found["explained_variance"]["value"] == pytest.approx(
        learning_metrics(experience)["critic/vf_explained_var"]
    )
    bins = np.array([int(16 * (place + 0.5) / length) for length in (16, 3, 40, 5) for place in range(length)])
    for position in range(16):
        here = bins == position
        by = {name: found["by_position"][name][position] for name in ("count", "value", "ret", "kl", "ev")}
        assert by["count"] == here.sum()
        assert by["value"] == pytest.approx(values[here].mean())
        assert by["ret"] == pytest.approx(returns[here].mean())
        assert by["kl"] == pytest.approx((old - ref)[here].mean())
        residual = (returns - values)[here]
        assert by["ev"] == pytest.approx(1 - residual.var() / (returns[here].var() + 1e-5), rel=1e-4, abs=1e-4)
    assert set(found["histograms"]) == {
        *("value", "ret", "advantage", "reward", "old", "log_ratio_ref", "log_ratio_rollout", "length", "score")
    }
    assert found["lengths"] == pytest.approx({"p10": 1.2, "p50": 5.0, "p90": 30.4})
    calibration, order = found["calibration"], np.argsort(values)
    assert sum(calibration["count"]) == 64
    assert calibration["value"][0] == pytest.approx(values[order[:7]].mean())
    assert calibration["ret"][0] == pytest.approx(returns[order[:7]].mean())
    assert len(calibration["edges"]) == len(calibration["count"]) + 1


def test_a_step_without_values_or_without_learned_tokens_has_statistics_all_the_same(tmp_path: Path) -> None:
    config = record_config(tmp_path, num_samples=2, algorithm__adv_estimator="grpo")
    for lengths in ([3, 4], [0, 0]):
        experience, scores = random_experience(config, lengths, columns=("old_log_probs",))
        tokens = StepTokens.of(experience)
        found = step_statistics(tokens, scores.scores)
        assert "calibration" not in found
        assert sum(found["by_position"]["count"]) == sum(lengths)


def drawn(kind: str, num: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Values and returns of responses, whose true explained variance is that of TRUE."""
    if kind == "normal":
        values = random.standard_normal(num)
        return values, values + random.standard_normal(num)
    values = random.uniform(*((0.1, 0.9) if kind == "outcome" else (0.9, 1.0)), num)
    return values, (random.random(num) < values).astype(np.float64)


# An outcome of probability p has the variance m (1 - m), with m the mean of p, of which var(p) is explained.
TRUE = {"normal": 0.5, "outcome": (0.8**2 / 12) / 0.25, "rare failures": (0.1**2 / 12) / (0.95 * 0.05)}


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("normal", [4] * 48),
        ("normal", [1 + row % 21 for row in range(256)]),
        ("outcome", [8] * 256),
        ("rare failures", [8] * 256),
    ],
)
def test_the_interval_of_the_explained_variance_covers_the_true_one(
    kind: str, lengths: list[int], tmp_path: Path
) -> None:
    """Of 1,000 critics; the tokens of a response share value and return."""
    experience, _ = random_experience(record_config(tmp_path), lengths)
    tokens, random, num_covered = StepTokens.of(experience), np.random.default_rng(shifted(0)), 0
    for _ in range(1000):
        values, returns = drawn(kind, len(lengths), random)
        tokens.lists["value"][:] = np.repeat(values, lengths)  # type: ignore[index]
        tokens.lists["ret"][:] = np.repeat(returns, lengths)  # type: ignore[index]
        found = explained_variance(tokens)
        num_covered += found["low"] <= TRUE[kind] <= found["high"]
    assert 930 <= num_covered <= 970


@pytest.mark.parametrize("errors", [[0.0] * 4, [0.0, 0.0, 0.0, 5.0], [2.0]])
def test_an_interval_is_finite_where_few_responses_err(errors: list[float], tmp_path: Path) -> None:
    experience, _ = random_experience(record_config(tmp_path), [3] * len(errors))
    tokens = StepTokens.of(experience)
    tokens.lists["value"][:] = tokens.lists["ret"] - np.repeat(errors, 3)  # type: ignore[index]
    found = explained_variance(tokens)
    assert all(np.isfinite([*found.values()]))
    assert found["low"] <= found["value"] <= found["high"]
    assert found["se"] >= 0.0


def test_the_auc_is_the_share_of_pairs_in_order() -> None:
    values, is_high = np.array([0.1, 0.4, 0.35, 0.8, np.nan]), np.array([False, False, True, True, True])
    assert auc(values, is_high) == pytest.approx(3 / 4)
    assert auc(np.zeros(4), np.array([True, False, True, False])) == pytest.approx(0.5)
    assert auc(np.array([0.0, 1e-9]), np.array([False, True])) == pytest.approx(0.5)  # equal but for rounding
    assert auc(values, np.zeros(5, np.bool_)) is None
