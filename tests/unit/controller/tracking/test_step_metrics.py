"""The metrics of a step worked by hand; all of them are declared."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from controller.ppo.experience import Experience
from controller.tracking.step_metrics import (
    balance_metrics,
    code_limit_metrics,
    explained_variance,
    learning_metrics,
    length_metrics,
    overlap_metrics,
    reward_extra_metrics,
    symbolic_metrics,
    timing_metrics,
)
from splitppo.batch import Batch, Column
from splitppo.config import DataConfig
from splitppo.run_folder.metrics import check_declared
from splitppo.run_folder.spans import Span


def experience(**changes: Any) -> Experience:
    """Responses of 2, no and 3 tokens, of which the middle one of the last is rejected."""
    advantages = [[1, 2], [], [-3, 0, 4]]
    returns = [np.abs(row) for row in advantages]
    lengths = np.array([2, 0, 3], np.int32)
    made = Experience(
        batch=Batch.from_rows(
            prompts=[[1]] * 3, responses=[[5, 6], [], [5, 6, 7]], advantages=advantages, returns=returns
        ),
        scores=np.array([1.0, 0.0, 0.5], np.float32),
        rewards=Column(np.array([-0.5, 1, 0, 0, 0.25], np.float32), lengths),
        learned=Column(np.array([1, 1, 1, 0, 1], bool), lengths),
        counted=Column(np.ones(5, bool), lengths),
    )
    return replace(made, **changes)


def test_learning_metrics_by_hand() -> None:
    metrics = learning_metrics(experience())
    assert {name: metrics[f"critic/{name}"] for name in ("score/mean", "score/max", "score/min")} == {
        "score/mean": 0.5,
        "score/max": 1.0,
        "score/min": 0.0,
    }
    assert (metrics["critic/rewards/mean"], metrics["critic/rewards/max"]) == (0.25, 0.5)
    assert (metrics["critic/advantages/mean"], metrics["critic/advantages/min"]) == (1.0, -3.0)
    assert (metrics["critic/returns/mean"], metrics["critic/returns/max"]) == (2.5, 4.0)
    assert not any("values" in name or "explained" in name for name in metrics)
    check_declared(metrics)


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one() -> None:
    returns_N = np.array([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(returns_N + 7.0, returns_N) == 1.0
    assert explained_variance(np.full(4, 2.0), returns_N) == pytest.approx(0.0, abs=1e-4)
    # var(returns - values) = 5 on a variance of 1.25.
    assert explained_variance(-returns_N, returns_N) == pytest.approx(1.0 - 5.0 / 1.25001)


def with_values() -> Batch:
    return experience().batch.merge(Batch.from_rows(values=[[1, 2], [], [3, 9, 4]]))


def test_values_and_their_explained_variance_count_only_tokens_that_are_learned_from() -> None:
    metrics = learning_metrics(experience(batch=with_values()))
    assert metrics["critic/vf_explained_var"] == 1.0
    assert metrics["critic/values/mean"] == 2.5
    check_declared(metrics)


def test_metrics_over_no_token_are_left_out() -> None:
    nothing = Column(np.zeros(5, bool), np.array([2, 0, 3], np.int32))
    metrics = learning_metrics(experience(batch=with_values(), learned=nothing))
    assert {name.split("/")[1] for name in metrics} == {"score", "rewards"}
    assert all(math.isfinite(value) for value in metrics.values())


def test_length_metrics_by_hand() -> None:
    limits = DataConfig(train_files=("a.jsonl",), train_batch_size=4, max_prompt_length=5, max_response_length=8)
    metrics = length_metrics(
        np.array([3, 5, 4, 4]), np.array([8, 0, 2, 6]), np.array([False, False, True, True]), limits
    )
    assert metrics == {
        "response_length/mean": 4.0,
        "response_length/max": 8.0,
        "response_length/min": 0.0,
        "response_length/clip_ratio": 0.25,
        "response_length_non_aborted/mean": pytest.approx(16 / 3),
        "response_length_non_aborted/max": 8.0,
        "response_length_non_aborted/min": 2.0,
        "response_length_non_aborted/clip_ratio": pytest.approx(1 / 3),
        "prompt_length/mean": 4.0,
        "prompt_length/max": 5.0,
        "prompt_length/min": 3.0,
        "prompt_length/clip_ratio": 0.25,
        "response/aborted_ratio": 0.25,
        "response/no_eos_ratio": 0.5,
    }
    check_declared(metrics)
    aborted = length_metrics(np.array([3]), np.array([0]), np.array([False]), limits)
    assert not any(name.startswith("response_length_non_aborted") for name in aborted)


def test_balance_metrics_compare_rows_in_order_with_balanced_ones() -> None:
    metrics = balance_metrics(np.array([10, 9, 2, 1]), 2)
    assert metrics == {
        "global_seqlen/min": 3.0,
        "global_seqlen/max": 19.0,
        "global_seqlen/minmax_diff": 16.0,
        "global_seqlen/balanced_min": 11.0,
        "global_seqlen/balanced_max": 11.0,
        "global_seqlen/mean": 11.0,
    }
    check_declared(metrics)


def test_numeric_fields_of_scorers_become_metrics_and_others_do_not() -> None:
    metrics = reward_extra_metrics({"acc": [True, None, False], "pred": ["a", "b", "c"], "none": [None, None, None]})
    assert metrics == {"reward_extra/acc/mean": 0.5, "reward_extra/acc/max": 1.0, "reward_extra/acc/min": 0.0}
    check_declared(metrics)
    hijacked = reward_extra_metrics({"acc": [1.0, 0.0, 1e308, 1e308, float("nan"), -float("inf"), 10**400]})
    assert hijacked == {"reward_extra/acc/mean": 0.5, "reward_extra/acc/max": 1.0, "reward_extra/acc/min": 0.0}


def test_code_answers_that_passed_a_limit_are_counted_by_limit_where_there_are_code_answers() -> None:
    metrics = code_limit_metrics({"code_limit": ["time", None, "memory", "time"]})
    assert metrics == {
        "reward/code_over_time": 2.0,
        "reward/code_over_memory": 1.0,
        "reward/code_over_processes": 0.0,
        "reward/code_over_files": 0.0,
        "reward/code_over_output": 0.0,
    }
    check_declared(metrics)
    assert code_limit_metrics({"acc": [1.0]}) == {}


def test_answers_that_sympy_did_not_compare_are_counted() -> None:
    metrics = symbolic_metrics({"symbolic": ["gave_up", None, "skipped", "skipped"]})
    assert metrics == {"reward/symbolic_gave_up": 1.0, "reward/symbolic_skipped": 2.0}
    check_declared(metrics)
    assert symbolic_metrics({}) == {"reward/symbolic_gave_up": 0.0, "reward/symbolic_skipped": 0.0}


def test_timings_per_token_and_throughput_by_hand() -> None:
    metrics = timing_metrics(
        {"gen": 2.0, "values": 1.0, "reward": 0.5}, num_response_tokens=1000, num_tokens=4000, step_s=5.0, num_ranks=2
    )
    assert metrics == {
        "timing_s/gen": 2.0,
        "timing_s/values": 1.0,
        "timing_s/reward": 0.5,
        "timing_s/step": 5.0,
        "timing_per_token_ms/gen": 2.0,
        "timing_per_token_ms/values": 0.25,
        "perf/total_num_tokens": 4000.0,
        "perf/time_per_step": 5.0,
        "perf/throughput": 400.0,
    }
    check_declared(metrics)


def overlap(
    *spans: tuple[str, str, float, float], until: float = 10.0, step: int = 3, takes_turns: bool = False
) -> dict[str, float]:
    """overlap/... of step 3, which lasts from 0 to `until`; names ending in "before" belong to step 2."""
    made = [
        Span(pool, name.removesuffix(" before"), 2 if name.endswith(" before") else 3, start, end)
        for pool, name, start, end in spans
    ]
    metrics = overlap_metrics(made, step=step, started_s=0.0, step_s=until, takes_turns=takes_turns)
    check_declared(metrics)
    return {name.removeprefix("overlap/"): pytest.approx(value) for name, value in metrics.items()}


def test_updates_at_the_same_time_hide_the_shorter_one() -> None:
    assert overlap(("actor", "gen", 0, 4), ("actor", "update_actor", 6, 10), ("critic", "update_critic", 6, 9)) == {
        "efficiency": 1.0,
        "bubble_actor": 0.2,
        "bubble_critic": 0.7,
        "idle_fraction": 0.2,
    }


def test_updates_one_after_the_other_hide_nothing() -> None:
    assert overlap(("actor", "update_actor", 0, 4), ("critic", "update_critic", 5, 10)) == {
        "efficiency": 0.0,
        "bubble_actor": 0.6,
        "bubble_critic": 0.5,
        "idle_fraction": 0.1,
    }


def test_updates_that_overlap_in_part_hide_that_part() -> None:
    # t_actor = 4, t_critic = 6, wall = 8: (4 + 6 - 8) / 4.
    assert overlap(("actor", "update_actor", 0, 4), ("critic", "update_critic", 2, 8))["efficiency"] == 0.5


def test_a_critic_update_that_runs_into_the_next_step_counts_in_each_step_as_far_as_it_lies_there() -> None:
    assert overlap(
        ("critic", "update_critic before", -3, 2),
        ("actor", "gen", 0, 5),
        ("actor", "update_actor", 5, 10),
        ("critic", "update_critic", 5, 15),
    ) == {"efficiency": 1.0, "bubble_actor": 0.0, "bubble_critic": 0.3, "idle_fraction": 0.0}


def test_critic_and_rollout_group_are_one_pool_if_they_take_turns_on_their_devices() -> None:
    calls = [
        ("critic", "update_critic before", -1, 1),
        ("rollout", "sync", 1, 1.5),
        ("rollout", "gen", 1.5, 4),
        ("actor", "gen", 0, 4),
        ("critic", "values", 4.5, 5),
        ("actor", "update_actor", 6, 10),
        ("critic", "update_critic", 6, 9),
    ]
    shared = {"efficiency": 1.0, "bubble_actor": 0.2, "idle_fraction": 0.15}
    assert overlap(*calls) == {**shared, "bubble_critic": 0.55, "bubble_rollout": 0.7}  # type: ignore[arg-type]
    assert overlap(*calls, takes_turns=True) == {**shared, "bubble_critic": 0.25}  # type: ignore[arg-type]


def test_without_a_critic_there_is_no_efficiency_and_other_pools_do_not_count() -> None:
    assert overlap(("actor", "gen", 0, 5), ("scoring", "score", 5, 10)) == {"bubble_actor": 0.5, "idle_fraction": 0.5}


def test_validations_checkpoints_and_restores_are_no_calls_of_a_step() -> None:
    calls = [("actor", "gen", 0, 5), ("actor", "update_actor", 6, 10), ("critic", "update_critic", 6, 9)]
    beside = [
        ("actor", "testing before", 5, 6),
        ("actor", "save_checkpoint before", 5, 6),
        ("critic", "save_checkpoint before", 0, 6),
        ("critic", "load_checkpoint before", 0, 6),
    ]
    assert overlap(*calls, *beside) == overlap(*calls)  # type: ignore[arg-type]
    assert overlap(*beside) == {}  # type: ignore[arg-type]


def test_calls_of_one_pool_that_overlap_are_not_counted_twice() -> None:
    assert overlap(("actor", "ref", 0, 5), ("actor", "old_log_prob", 2, 6))["bubble_actor"] == 0.4


def test_an_interval_without_length_has_no_overlap_metrics() -> None:
    assert overlap(("actor", "gen", 0, 5), until=0.0) == {}


@pytest.mark.parametrize("field", ["", " ", "a/b", "two\nlines", "\ud83d"])
def test_a_scorer_may_name_its_fields_as_it_likes(field: str) -> None:
    check_declared(reward_extra_metrics({field: [1.0]}))
