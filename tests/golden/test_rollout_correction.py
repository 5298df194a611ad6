"""Rollout correction against numbers worked by hand and against a float64 reference that loops over tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from controller.ppo.rollout_correction import Correction, correct_rollout
from controller.ppo.rollout_mismatch import mismatch_metrics
from splitppo.config.sections.algorithm import RolloutCorrectionConfig
from splitppo.config.subsections.rejection import REJECTION_OPTIONS
from splitppo.run_folder.metrics import check_declared
from tests.support.seeds import shifted

BearerTokens = list[list[tuple[float, float]]]

# Probabilities by trainer and by rollout backend: r is 2, 0.5 | 4 | nothing.
PROBABILITIES = [[(0.4, 0.2), (0.2, 0.4)], [(0.8, 0.2)], []]
LN2 = math.log(2.0)


def correct(rows: BearerTokens, **keys: Any) -> Correction:
    """Corrects rows of (probability by the trainer, by the rollout backend); the padding is NaN and must not matter."""
    width = max((len(row) for row in rows), default=0) + 1
    old, rollout, mask = (
        np.full((len(rows), width), number, dtype) for number, dtype in [(np.nan, np.float32)] * 2 + [(0, np.bool_)]
    )
    for index, row in enumerate(rows):
        for t, (p, q) in enumerate(row):
            old[index, t], rollout[index, t], mask[index, t] = math.log(p), math.log(q), True
    correction = correct_rollout(RolloutCorrectionConfig.model_validate(keys), old, rollout, mask)
    check_declared(correction.metrics)
    return correction


def short(correction: Correction, prefix: str) -> dict[str, float]:
    """The metrics under a prefix, without it."""
    return {name.removeprefix(prefix): v for name, v in correction.metrics.items() if name.startswith(prefix)}


# Numbers by hand.


def test_what_is_measured_without_any_correction_by_hand() -> None:
    correction = correct(PROBABILITIES)

    assert correction.weights is None
    assert correction.learned.tolist() == [[True, True, False], [True, False, False], [False] * 3]
    differences = [0.2, 0.2, 0.6]
    mean_sq = np.mean([4.0, 0.25, 16.0])
    # Mean log-probs: -1.2629 both (row 0: p and q are each other's), ln 0.8 and ln 0.2.
    geometric = 1.0 / math.sqrt(0.4 * 0.2)
    assert correction.metrics == pytest.approx(
        {
            "training/rollout_probs_diff_max": 0.6,
            "training/rollout_probs_diff_mean": np.mean(differences),
            "training/rollout_probs_diff_std": np.std(differences, ddof=1),
            "training/rollout_log_probs_diff_max": 2 * LN2,
            "training/rollout_log_probs_diff_mean": 4 * LN2 / 3,
            "training/rollout_actor_probs_pearson_corr": np.corrcoef([0.4, 0.2, 0.8], [0.2, 0.4, 0.2])[0, 1],
            "rollout_corr/kl": -2 * LN2 / 3,
            "rollout_corr/k3_kl": np.mean([1 - LN2, -0.5 + LN2, 3 - 2 * LN2]),
            "rollout_corr/chi2_token": mean_sq - 1,
            "rollout_corr/chi2_seq": np.mean([1.0, 16.0]) - 1,
            "rollout_corr/training_ppl": np.mean([geometric, 1.25]),
            "rollout_corr/rollout_ppl": np.mean([geometric, 5.0]),
            "rollout_corr/training_log_ppl": np.mean([math.log(geometric), math.log(1.25)]),
            "rollout_corr/rollout_log_ppl": np.mean([math.log(geometric), math.log(5.0)]),
            "rollout_corr/log_ppl_diff": -LN2,
            "rollout_corr/log_ppl_abs_diff": LN2,
            "rollout_corr/log_ppl_diff_max": 0.0,
            "rollout_corr/log_ppl_diff_min": -2 * LN2,
            "rollout_corr/ppl_ratio": np.mean([1.0, 0.25]),
        },
        rel=1e-6,
        abs=1e-7,
    )


def test_token_weights_are_truncated_ratios_by_hand() -> None:
    correction = correct(PROBABILITIES, rollout_is="token", rollout_is_threshold=3.0)

    np.testing.assert_allclose(correction.weights, [[2.0, 0.5, 0.0], [3.0, 0.0, 0.0], [0.0] * 3], rtol=1e-6)
    assert correction.weights is not None
    assert correction.weights.dtype == np.float32
    # Of the weights as they are applied; the fractions are of those before the truncation: 2, 0.5 | 4.
    applied = np.array([2.0, 0.5, 3.0])
    assert short(correction, "rollout_corr/rollout_is_") == pytest.approx(
        {
            "mean": 5.5 / 3,
            "max": 3.0,
            "min": 0.5,
            "std": applied.std(),
            "ratio_fraction_high": 1 / 3,
            "ratio_fraction_low": 0.0,
            "eff_sample_size": applied.mean() ** 2 / (applied**2).mean(),
            "seq_mean": np.mean([1.25, 3.0]),
            "seq_std": np.std([1.25, 3.0], ddof=1),
            "seq_max": 3.0,
            "seq_min": 1.25,
            "seq_max_deviation": 2.0,
            "seq_fraction_high": 0.5,
            "seq_fraction_low": 0.0,
        },
        rel=1e-6,
    )


def test_weights_outside_of_two_bounds_are_0_by_hand() -> None:
    correction = correct(PROBABILITIES, rollout_is="token", rollout_is_threshold="0.6_3.0")

    np.testing.assert_allclose(correction.weights, [[2.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0] * 3], rtol=1e-6)
    assert correction.learned.sum() == 3  # nothing is rejected
    metrics = short(correction, "rollout_corr/rollout_is_")
    assert metrics["oob_ratio"] == pytest.approx(2 / 3)
    assert (metrics["ratio_fraction_low"], metrics["ratio_fraction_high"]) == pytest.approx((1 / 3, 1 / 3))
    assert (metrics["mean"], metrics["max"], metrics["min"]) == pytest.approx((2 / 3, 2.0, 0.0))
    assert metrics["eff_sample_size"] == pytest.approx((2 / 3) ** 2 / (4 / 3))
    by_response = correct(PROBABILITIES, rollout_is="sequence", rollout_is_threshold="0.6_3.0").weights
    np.testing.assert_allclose(by_response, [[1.0, 1.0, 0.0], [0.0] * 3, [0.0] * 3], rtol=1e-6)
    nothing = correct(PROBABILITIES, rollout_is="token", rollout_is_threshold="8_9", rollout_is_batch_normalize=True)
    assert nothing.weights is not None
    assert not nothing.weights.any()


def test_sequence_weights_are_the_truncated_product_on_every_token_by_hand() -> None:
    correction = correct([[(0.4, 0.2), (0.3, 0.4)], [(0.8, 0.2)], []], rollout_is="sequence")

    np.testing.assert_allclose(correction.weights, [[1.5, 1.5, 0.0], [2.0, 0.0, 0.0], [0.0] * 3], rtol=1e-6)
    # The extremes of responses are those before the truncation, the mean is not.
    assert correction.metrics["rollout_corr/rollout_is_max"] == pytest.approx(4.0)
    assert correction.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(5.0 / 3)
    assert correction.metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 0.5


@pytest.mark.parametrize(
    ("level", "factor", "weights"),
    [("token", 4.5 / 3, [[2.0, 0.5], [2.0, 0.0]]), ("sequence", 1.5, [[1.0, 1.0], [2.0, 0.0]])],
)
def test_normalised_weights_are_divided_by_their_mean_by_hand(
    level: str, factor: float, weights: list[list[float]]
) -> None:
    correction = correct(PROBABILITIES[:2], rollout_is=level, rollout_is_batch_normalize=True)

    assert correction.weights is not None
    np.testing.assert_allclose(correction.weights[:, :2], np.array(weights) / factor, rtol=1e-6)
    assert correction.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(factor)


def test_a_token_is_rejected_where_its_ratio_leaves_the_bounds_by_hand() -> None:
    correction = correct(PROBABILITIES, rollout_rs="token_k1", rollout_rs_threshold="0.3_3.0")

    assert correction.learned.tolist() == [[True, True, False], [False] * 3, [False] * 3]
    metrics = short(correction, "rollout_corr/rollout_rs_")
    assert metrics["masked_fraction"] == metrics["token_k1_masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["seq_masked_fraction"] == 0.5
    # k1 is -log r: a token that the trainer likes better is under the lower bound.
    assert metrics["token_k1_fraction_low"] == pytest.approx(1 / 3)
    assert metrics["token_k1_fraction_high"] == 0.0
    assert metrics["token_k1_min"] == pytest.approx(-2 * LN2)
    assert metrics["token_k1_seq_max"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("option", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_the_bounds_of_k1_are_of_the_rollout_engines_probability_over_the_trainers(option: str) -> None:
    # (trainer's, rollout backend's): rollout / trainer is 0.4, 0.6, 3 and 5.
    rows = [[(0.5, 0.2)], [(0.5, 0.3)], [(0.1, 0.3)], [(0.1, 0.5)]]
    correction = correct(rows, rollout_rs=option, rollout_rs_threshold="0.5_4.0")

    assert correction.learned[:, 0].tolist() == [False, True, True, False]
    assert correction.metrics[f"rollout_corr/rollout_rs_{option}_fraction_low"] == 0.25
    assert correction.metrics[f"rollout_corr/rollout_rs_{option}_fraction_high"] == 0.25


def test_a_response_is_rejected_as_a_whole_by_its_mean_k3_by_hand() -> None:
    # Mean k3: of row 0 (0.307 + 0.193) / 2 = 0.25, of row 1 1.614.
    correction = correct(PROBABILITIES, rollout_rs="seq_mean_k3", rollout_rs_threshold=0.26)

    assert correction.learned.tolist() == [[True, True, False], [False] * 3, [False] * 3]
    assert correction.metrics["rollout_corr/rollout_rs_seq_mean_k3_seq_mean"] == pytest.approx((0.25 + 3 - 2 * LN2) / 2)


def test_of_several_criteria_all_must_be_passed() -> None:
    correction = correct(PROBABILITIES, rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold="0.6_3.0, 0.3")

    # -log 2 is under log 0.6 (first token of row 0); row 1 has k2 = (log 4)^2 / 2 = 0.96.
    assert correction.learned.tolist() == [[False, True, False], [False] * 3, [False] * 3]
    metrics = short(correction, "rollout_corr/rollout_rs_")
    assert metrics["token_k1_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["seq_max_k2_masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["seq_masked_fraction"] == 1.0


def test_weights_do_not_depend_on_what_is_rejected() -> None:
    alone = correct(PROBABILITIES, rollout_is="token", rollout_is_batch_normalize=True)
    both = correct(
        PROBABILITIES,
        rollout_is="token",
        rollout_is_batch_normalize=True,
        rollout_rs="token_k3",
        rollout_rs_threshold=1.0,
    )

    np.testing.assert_array_equal(alone.weights, both.weights)
    assert both.learned.sum() == 2


def test_a_token_that_the_trainer_finds_improbable_rejects_its_response_and_no_other_token_does() -> None:
    """Verl's veto, as its versions up to 0.7.0 write it: (log_ratio < log(threshold)).any() over a response."""
    veto = 0.01
    rows = [[(0.5, 0.5), (0.0099 * 0.5, 0.5)], [(0.5, 0.5), (0.0101 * 0.5, 0.5)], [(0.9, 0.001)]]
    kept = [all(math.log(p / q) >= math.log(veto) for p, q in row) for row in rows]
    assert kept == [False, True, True]
    learned = correct(rows, rollout_rs="seq_max_k1", rollout_rs_threshold=1.0 / veto).learned
    assert [learned[index, : len(row)].tolist() for index, row in enumerate(rows)] == [[False] * 2, [True] * 2, [True]]


# An independent reference.


def reference_statistic(option: str, row: list[tuple[float, float]]) -> list[float]:
    """For each token of a response, what the option compares with its bounds."""
    values = []
    for p, q in row:
        log_r = math.log(p / q)
        values.append({"k1": -log_r, "k2": log_r * log_r / 2, "k3": p / q - 1 - log_r}[option[-2:]])
    if option.startswith("token") or not values:
        return values
    whole = {"seq_sum": sum, "seq_mean": lambda v: sum(v) / len(v), "seq_max": max}[option[:-3]](values)
    return [whole] * len(row)


def random_rows(seed: int) -> BearerTokens:
    rng = np.random.default_rng(shifted(seed))
    rows = []
    for length in [5, 0, 1, 9, 3, 0, 12]:
        p = rng.uniform(0.05, 0.95, length)
        q = np.clip(p * np.exp(rng.normal(0, 0.3, length)), 1e-3, 1.0)
        rows.append([(float(a), float(b)) for a, b in zip(p, q, strict=True)])
    return rows


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("option", REJECTION_OPTIONS)
def test_rejection_equals_the_reference(option: str, seed: int) -> None:
    rows = random_rows(seed)
    bounds = {"seq_max_k1": (1.3, -math.inf, math.log(1.3))} | dict.fromkeys(
        ("token_k1", "seq_sum_k1", "seq_mean_k1"), ("0.8_1.3", math.log(0.8), math.log(1.3))
    )
    threshold, low, high = bounds.get(option, (0.05, -math.inf, 0.05))

    correction = correct(rows, rollout_rs=option, rollout_rs_threshold=threshold)

    statistics = [reference_statistic(option, row) for row in rows]
    for index, statistic in enumerate(statistics):
        assert correction.learned[index, : len(statistic)].tolist() == [low <= value <= high for value in statistic]
        assert not correction.learned[index, len(statistic) :].any()
    of_tokens = [value for statistic in statistics for value in statistic]
    of_rows = [sum(statistic) / len(statistic) for statistic in statistics if statistic]
    counted = of_tokens if option.startswith("token") else of_rows
    expected = {
        "mean": sum(of_tokens) / len(of_tokens),
        "max": max(counted),
        "min": min(counted),
        "std": np.std([min(max(value, low), high) for value in of_tokens]),
        "fraction_high": sum(value > high for value in counted) / len(counted),
        "fraction_low": sum(value < low for value in counted) / len(counted),
        "seq_mean": sum(of_rows) / len(of_rows),
        "seq_std": np.std(of_rows, ddof=1),
        "seq_max_deviation": max(abs(value) for value in of_rows),
        "masked_fraction": sum(not low <= value <= high for value in of_tokens) / len(of_tokens),
    }
    metrics = short(correction, f"rollout_corr/rollout_rs_{option}_")
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("lower", [None, 0.8])
def test_weights_equal_the_reference(level: str, lower: float | None, seed: int) -> None:
    rows = random_rows(seed)

    correction = correct(rows, rollout_is=level, rollout_is_threshold=1.2 if lower is None else f"{lower}_1.2")

    assert correction.weights is not None
    for index, row in enumerate(rows):
        product = math.prod(p / q for p, q in row)
        ratios = [p / q if level == "token" else product for p, q in row]
        expected = [min(r, 1.2) if lower is None else r if lower <= r <= 1.2 else 0.0 for r in ratios]
        np.testing.assert_allclose(correction.weights[index, : len(row)], expected, rtol=1e-5)
        assert not correction.weights[index, len(row) :].any()


# Where there is nothing to measure.


def test_without_any_token_there_is_no_metric_and_nothing_to_learn() -> None:
    correction = correct([[], []], rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=2.0)

    assert correction.metrics == {}
    assert not correction.learned.any()
    assert correction.weights is not None
    assert not correction.weights.any()


def test_a_single_token_has_no_correlation_and_no_deviation() -> None:
    metrics = correct([[(0.5, 0.25)]]).metrics

    assert metrics["training/rollout_probs_diff_std"] == 0.0
    assert "training/rollout_actor_probs_pearson_corr" not in metrics


def test_log_probs_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"same shape, got \(1, 2\), \(1, 3\) and \(1, 2\)"):
        mismatch_metrics(np.zeros((1, 2)), np.zeros((1, 3)), np.ones((1, 2), np.bool_))
