"""What the actor measures beside its loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.actor.measurements import memory_metrics, rollout_disagreement
from splitppo.batch import Batch


def alone(values: Any, _: Any) -> Any:
    return values


def rows(**columns: Any) -> Batch:
    return Batch.from_rows(responses=[[1, 2], [3]], **columns)


def test_probability_difference_by_hand() -> None:
    batch = rows(
        rollout_log_probs=[np.log([0.5, 0.2]), np.log([0.8])], old_log_probs=[np.log([0.4, 0.2]), np.log([0.5])]
    )

    metrics = rollout_disagreement(batch, batch["old_log_probs"], alone)

    differences = [0.1, 0.0, 0.3]
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.3, rel=1e-5)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(np.mean(differences), rel=1e-5)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(np.std(differences, ddof=1), rel=1e-5)


def test_kl_estimates_by_hand() -> None:
    batch = rows(
        rollout_log_probs=[np.log([0.5, 0.2]), np.log([0.8])], old_log_probs=[np.log([0.4, 0.2]), np.log([0.5])]
    )

    metrics = rollout_disagreement(batch, batch["old_log_probs"], alone)

    log_ratios = np.log([0.4 / 0.5, 1.0, 0.5 / 0.8])
    assert metrics["rollout_corr/kl"] == pytest.approx(-log_ratios.mean(), rel=1e-5)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((np.exp(log_ratios) - 1 - log_ratios).mean(), rel=1e-5)


def test_tokens_outside_the_mask_do_not_count() -> None:
    batch = rows(
        rollout_log_probs=[np.log([0.5, 0.2]), np.log([0.8])],
        old_log_probs=[np.log([0.4, 0.2]), np.log([0.5])],
        response_mask=[[1, 1], [0]],
    )

    assert rollout_disagreement(batch, batch["old_log_probs"], alone)["training/rollout_probs_diff_max"] < 0.11


def test_no_counting_token_gives_no_metric() -> None:
    batch = rows(rollout_log_probs=[[-1, -1], [-1]], old_log_probs=[[-1, -1], [-1]], response_mask=[[0, 0], [0]])

    assert rollout_disagreement(batch, batch["old_log_probs"], alone) == {}


def test_main_memory_in_use_is_a_plausible_number() -> None:
    assert 0.01 < memory_metrics(torch.device("cpu"))["perf/cpu_memory_used_gb"] < 100_000
