"""Partial rollouts in the configuration: what corrects them, what they resolve, what is refused, the largest age."""

from pathlib import Path

import pytest

from splitppo.config.batch_plan import batch_plan
from tests.support.configs import load, mistake

PARTIAL = "rollout.max_step_tokens=64"
CORRECTION = "algorithm.rollout_correction"
TOKEN = f"{CORRECTION}.rollout_is=token"
KEY = "rollout.max_step_tokens (64)"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((PARTIAL,), f"{KEY} learns from tokens of older weights: expected {CORRECTION}.rollout_is token, or"),
        (
            (PARTIAL, f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=2.0"),
            "rollout_rs alone rejects and corrects nothing",
        ),
        ((PARTIAL, f"{CORRECTION}.rollout_is=sequence"), f"expected {CORRECTION}.rollout_is token, got sequence"),
        ((PARTIAL, TOKEN, "rollout.check_freq=1"), "rollout.check_freq (1) compares log-probs under the same weights"),
        ((PARTIAL, TOKEN, "rollout.stream_groups=2"), f"{KEY} and rollout.stream_groups (2) exclude each other"),
        ((PARTIAL, TOKEN, "rollout.staleness=1"), f"{KEY} and rollout.staleness 1 exclude each other"),
        (
            (PARTIAL, TOKEN, "rollout.share=0.5", "services.rollout={num_processes: 1}"),
            f"{KEY} and rollout.share (0.5) exclude each other",
        ),
        (
            (PARTIAL, TOKEN, "algorithm.filter_groups.enable=true", "rollout.n=2"),
            f"{KEY} and algorithm.filter_groups.enable exclude each other",
        ),
        (
            (PARTIAL, TOKEN, "algorithm.adv_estimator=remax"),
            f"{KEY} and algorithm.adv_estimator remax exclude each other",
        ),
        (
            (PARTIAL, TOKEN, "rollout.multi_turn.environments={a: {tools: [python]}}"),
            f"{KEY} and rollout.multi_turn.environments exclude each other",
        ),
        (("rollout.max_step_tokens=0",), "key 'rollout.max_step_tokens': input should be greater than or equal to 1"),
        (("rollout.max_step_tokens=1e12",), "key 'rollout.max_step_tokens': input should be less than 2147483648"),
        ((PARTIAL, TOKEN, "rollout.overcommit=0.9"), "key 'rollout.overcommit': input should be greater than or equal"),
        (("rollout.overcommit=2",), "rollout.overcommit (2) is of no use without rollout.max_step_tokens"),
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
    config = load(tmp_path, PARTIAL, "data.max_response_length=256", *overrides)
    assert config.algorithm.rollout_correction.bypasses == bypasses
    assert config.needs_old_log_probs == needs_old
    assert (config.rollout.check_freq, config.rollout.stream_groups) == (0, 1)


def test_the_plan_says_how_old_a_token_can_be(tmp_path: Path) -> None:
    config = load(tmp_path, PARTIAL, TOKEN, "data.max_response_length=200")
    assert "a token is at most 4 updates old when it is learned from" in batch_plan(config)


def test_the_plan_has_no_more_responses_than_two_batches_have(tmp_path: Path) -> None:
    config = load(tmp_path, PARTIAL, TOKEN, "data.train_batch_size=8", "rollout.overcommit=1e300")
    assert "of each of 16 unfinished responses" in batch_plan(config)
