"""Coefficients that adapt over a whole run, against slow references in exact fractions."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from controller.ppo.entropy import entropy_coeff_in_force, next_entropy_coeff
from controller.ppo.kl import next_kl_coef
from splitppo.config import AlgorithmConfig
from splitppo.config.subsections.phases import AdaptiveEntropy


def test_the_kl_coefficient_follows_ziegler_2019_over_a_run() -> None:
    """Error e = clip(kl / target - 1, -0.2, 0.2); beta' = beta (1 + K_beta e), K_beta = samples / horizon."""
    target, horizon, num_samples = 0.1, 2000, 64
    config = AlgorithmConfig(kl_ctrl="adaptive", kl_target=target, kl_horizon=horizon)
    draw, coef, beta = random.Random(0), 0.05, Fraction(0.05)
    for _ in range(300):
        kl = draw.choice((draw.uniform(-0.05, 0.3), target * draw.uniform(0.85, 1.15)))
        coef = next_kl_coef(config, coef, kl, num_samples=num_samples)
        error = Fraction(kl) / Fraction(target) - 1
        error = max(min(error, Fraction(1, 5)), Fraction(-1, 5))
        beta *= 1 + Fraction(num_samples, horizon) * error
        assert coef == pytest.approx(float(beta), rel=1e-12)


def test_the_entropy_coefficient_follows_skywork_or1_over_a_run() -> None:
    """Coefficient c' = c + delta where e <= target, else c - delta; alpha = c' where e <= target, else 0."""
    low, high, delta, target = 0.0, 0.03, 0.005, 0.2
    config = AdaptiveEntropy(
        enable=True,
        target_entropy=target,
        entropy_coeff_delta=delta,
        min_entropy_coeff=low,
        max_entropy_coeff=high,
    )
    draw, coeff, c, seen = random.Random(1), 0.01, Fraction(0.01), set()
    for step in range(300):
        entropy = draw.uniform(0.0, 0.4) if step % 40 else target
        coeff = next_entropy_coeff(config, coeff, entropy)
        c = max(Fraction(low), min(Fraction(high), c + (Fraction(delta) if entropy <= target else -Fraction(delta))))
        alpha = c * int(entropy <= target)
        assert coeff == pytest.approx(float(c), abs=1e-12)
        assert entropy_coeff_in_force(config, coeff, entropy) == pytest.approx(float(alpha), abs=1e-12)
        seen.add(round(float(c), 9))
    assert {low, high} <= seen  # both bounds were reached


def test_where_nothing_is_known_of_the_entropy_the_coefficient_stays_and_is_in_force() -> None:
    config = AdaptiveEntropy(enable=True)
    assert next_entropy_coeff(config, 0.01, None) == 0.01
    assert entropy_coeff_in_force(config, 0.01, None) == 0.01


@pytest.mark.parametrize("entropy", [math.nan, math.inf])
def test_an_entropy_that_is_not_finite_is_refused(entropy: float) -> None:
    with pytest.raises(ValueError, match=f"needs a finite entropy, got {entropy}"):
        next_entropy_coeff(AdaptiveEntropy(enable=True), 0.01, entropy)
