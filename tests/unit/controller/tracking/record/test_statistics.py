"""The footer of a step: histograms, positions, calibration, and how sure the explained variance is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from controller.tracking.record.statistics import auc, explained_variance, histogram, step_statistics
from controller.tracking.record.step_tokens import StepTokens
from controller.tracking.step_metrics import learning_metrics
from tests.support.recorded import random_experience, record_config


def test_a_histogram_counts_every_finite_value_and_reaches_to_the_extremes() -> None:
    values = np.concatenate([np.random.default_rng(0).standard_normal(5000), [1e6, -1e6, np.nan, np.inf]])
    found = histogram(values)
    assert sum(found["counts"]) == 5002
    assert len(found["counts"]) == 48
    assert found["edges"] == sorted(found["edges"])
    assert (found["edges"][0], found["edges"][-1]) == (-1e6, 1e6)
    assert found["edges"][1:-1] == pytest.approx(
        np.linspace(found["edges"][1], found["edges"][-2], 47).tolist(), abs=1e-6
    )
    assert max(found["counts"]) < 1000  # the two extremes have not made one bin of all others


@pytest.mark.parametrize("values", [[3.0], [2.0] * 50, [0.0] * 5000 + [1.0]])
def test_a_histogram_of_few_different_values_counts_all(values: list[float]) -> None:
    found = histogram(np.array(values, np.float32))
    assert sum(found["counts"]) == len(values)
    assert found["edges"][0] <= min(values) <= max(values) <= found["edges"][-1]


def test_the_statistics_of_a_step_agree_with_float64_sums_over_its_tokens(tmp_path: Path) -> None:
    experience, scores = random_experience(record_config(tmp_path), [16, 3, 0, 40, 5])
    tokens = StepTokens.of(experience)
    found = step_statistics(tokens, tokens.numbers(), scores.scores, seed=1, step=2)
    values, returns, old, ref = (
        experience.batch[name].values.astype(np.float64)
        for name in ("values", "returns", "old_log_probs", "ref_log_probs")
    )
    assert found["explained_variance"]["value"] == pytest.approx(
        learning_metrics(experience)["critic/vf_explained_var"]
    )
    bins = np.array([16 * place // length for length in (16, 3, 40, 5) for place in range(length)])
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
        found = step_statistics(tokens, tokens.numbers(), scores.scores, seed=1, step=1)
        assert "calibration" not in found
        assert sum(found["by_position"]["count"]) == sum(lengths)


def test_the_interval_of_the_explained_variance_covers_the_true_one(tmp_path: Path) -> None:
    """Values and returns of 128 responses of 4 tokens, which share an error; the true explained variance is 0.5."""
    experience, _ = random_experience(record_config(tmp_path), [4] * 128)
    tokens, random, num_covered, num_critics = StepTokens.of(experience), np.random.default_rng(0), 0, 400
    for critic in range(num_critics):
        values = np.repeat(random.standard_normal(128), 4)
        tokens.lists["value"][:] = values  # type: ignore[index]
        tokens.lists["ret"][:] = values + np.repeat(random.standard_normal(128), 4)  # type: ignore[index]
        found = explained_variance(tokens, seed=1, step=critic)
        num_covered += found["low"] <= 0.5 <= found["high"]
        assert found["low"] <= found["high"]
    assert 0.91 <= num_covered / num_critics <= 0.98


def test_the_bootstrap_is_the_same_for_the_same_seed_and_step(tmp_path: Path) -> None:
    experience, _ = random_experience(record_config(tmp_path), [4] * 20)
    tokens = StepTokens.of(experience)
    assert explained_variance(tokens, seed=1, step=3) == explained_variance(tokens, seed=1, step=3)
    assert explained_variance(tokens, seed=1, step=3) != explained_variance(tokens, seed=1, step=4)


def test_the_auc_is_the_share_of_pairs_in_order() -> None:
    values, is_high = np.array([0.1, 0.4, 0.35, 0.8, np.nan]), np.array([False, False, True, True, True])
    assert auc(values, is_high) == pytest.approx(3 / 4)
    assert auc(np.zeros(4), np.array([True, False, True, False])) == pytest.approx(0.5)
    assert auc(values, np.zeros(5, np.bool_)) is None
