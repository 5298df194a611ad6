"""Dynamic sampling in the configuration: refused values, and the batch plan."""

from pathlib import Path

import pytest

from splitppo.config.batch_plan import batch_plan
from tests.support.configs import load, mistake

ENABLED = ("algorithm.filter_groups.enable=true", "rollout.n=4")
LIMIT = "algorithm.filter_groups.max_num_gen_batches"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("algorithm.filter_groups.enable=true",),
            "algorithm.filter_groups.enable drops prompts whose samples are all alike, and a single one always is:"
            " expected rollout.n of at least 2, got 1",
        ),
        (
            ("data.gen_batch_size=16",),
            "data.gen_batch_size (16) must be data.train_batch_size (8) unless algorithm.filter_groups.enable is true",
        ),
        (
            (*ENABLED, "rollout.stream_groups=2"),
            "rollout.stream_groups (2) and algorithm.filter_groups.enable exclude each other",
        ),
        (
            (*ENABLED, "data.gen_batch_size=3", f"{LIMIT}=2"),
            f"{LIMIT} (2) rounds of data.gen_batch_size (3) prompts can never fill data.train_batch_size (8);"
            f" raise {LIMIT}",
        ),
        ((*ENABLED, f"{LIMIT}=-1"), f"key '{LIMIT}': input should be greater than or equal to 0, got -1"),
        (
            (*ENABLED, "algorithm.filter_groups.metric="),
            "key 'algorithm.filter_groups.metric': input should be a valid",
        ),
        (
            ("algorithm.filter_groups.enable=true", "rollout.n=64", "data.gen_batch_size=4096"),
            "data.gen_batch_size (4096) times rollout.n (64) must not exceed 131072 responses",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_keys_to_change(
    tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    assert sentence in mistake(tmp_path, *overrides)


def test_greedy_scores_are_not_taken_off_whitened_rewards(tmp_path: Path) -> None:
    sentence = mistake(tmp_path, "algorithm.adv_estimator=remax", "reward.shaping.whiten_rewards=true")
    assert sentence.startswith("algorithm.adv_estimator remax subtracts the score of a greedy response from rewards")


def test_a_generation_has_as_many_prompts_as_a_step_where_nothing_else_is_said(tmp_path: Path) -> None:
    assert load(tmp_path, *ENABLED).data.draw_size == 8
    assert load(tmp_path, *ENABLED, "data.gen_batch_size=24").data.draw_size == 24
    assert load(tmp_path, "data.gen_batch_size=8").data.draw_size == 8


def test_nothing_is_streamed_where_groups_are_chosen(tmp_path: Path) -> None:
    assert load(tmp_path).rollout.stream_groups == 6
    assert load(tmp_path, *ENABLED).rollout.stream_groups == 1


def test_the_plan_says_how_a_step_is_filled(tmp_path: Path) -> None:
    limited = load(tmp_path, *ENABLED, "algorithm.filter_groups.metric=acc", "data.gen_batch_size=24", f"{LIMIT}=10")
    assert batch_plan(limited).splitlines()[1] == (
        "dynamic sampling: 24 prompts are drawn and answered at a time, at most 10 times; those whose samples are all"
        " alike in 'acc' are dropped"
    )
    assert "until the step is full" in batch_plan(load(tmp_path, *ENABLED))
    assert "dynamic sampling" not in batch_plan(load(tmp_path))
