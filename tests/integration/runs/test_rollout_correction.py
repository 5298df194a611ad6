"""Real runs in which the rollout engine's log-probs are compared with the trainer's, and corrected for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.runs import started


def test_a_rollout_engine_that_differs_ends_the_run_with_one_sentence(config: dict[str, Any], tmp_path: Path) -> None:
    # No two programs agree to 1e-12 nats.
    check = ("rollout.check_freq=1", "rollout.max_log_prob_diff=1e-12")
    with started(config, tmp_path / "run", *check) as controller:
        assert controller.wait() == 1
        controller.wait_nothing_is_left()
    assert "error: step 1: log-probs of the rollout engine and the trainer differ by up to" in controller.output
    assert "rollout.max_log_prob_diff" in controller.output
    assert "Traceback" not in controller.output
    assert controller.folder.summary["exit_reason"] == "failed"
    assert not controller.folder.metrics[1:]


def test_rollouts_are_corrected_in_a_run(config: dict[str, Any], tmp_path: Path) -> None:
    correction = '{rollout_is: token, rollout_rs: "token_k1,seq_mean_k3", rollout_rs_threshold: "0.5_2.0,0.1"}'
    overrides = (f"algorithm.rollout_correction={correction}", "rollout.check_freq=1", "run.total_steps=1")
    with started(config, tmp_path / "run", *overrides) as controller:
        assert controller.wait() == 0
    metrics = controller.folder.metrics[-1]
    # The engine is the policy itself: it differs by rounding only.
    assert 0.0 < metrics["training/rollout_log_probs_diff_max"] < 1e-3
    assert abs(metrics["rollout_corr/rollout_is_mean"] - 1.0) < 1e-4
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.0
    assert metrics["actor/grad_norm"] > 0.0
