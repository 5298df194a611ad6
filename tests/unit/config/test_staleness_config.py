"""Staleness in the configuration: what corrects it, what it resolves, and what is refused."""

from pathlib import Path

import pytest

from tests.support.configs import load, mistake

STALE = "rollout.staleness=1"
CORRECTION = "algorithm.rollout_correction"
TOKEN = f"{CORRECTION}.rollout_is=token"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((STALE,), f"rollout.staleness 1 learns from responses of older weights: expected {CORRECTION}.rollout_is"),
        (
            (STALE, f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=2.0"),
            "rollout_rs alone rejects and corrects nothing",
        ),
        (("rollout.staleness=2",), "key 'rollout.staleness': input should be 0 or 1, got 2"),
        ((STALE, TOKEN, "rollout.check_freq=1"), "rollout.check_freq (1) compares log-probs under the same weights"),
        ((STALE, TOKEN, "rollout.stream_groups=2"), "rollout.stream_groups (2) and rollout.staleness 1 exclude each"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_keys_to_change(
    tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    assert sentence in mistake(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("overrides", "bypasses", "needs_old"),
    [
        ((TOKEN,), False, True),
        ((f"{CORRECTION}.bypass_mode=true",), True, False),
        ((f"{CORRECTION}.loss_type=reinforce",), True, False),
    ],
)
def test_old_log_probs_are_computed_unless_those_of_sampling_are_taken(
    tmp_path: Path, overrides: tuple[str, ...], bypasses: bool, needs_old: bool
) -> None:
    config = load(tmp_path, STALE, *overrides)
    assert config.algorithm.rollout_correction.bypasses == bypasses
    assert config.needs_old_log_probs == needs_old
    assert (config.rollout.check_freq, config.rollout.stream_groups) == (0, 1)
