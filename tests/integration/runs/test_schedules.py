"""The three schedules compute the same and differ in what runs at the same time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from tests.runs import NUM_STEPS, RunFolder

# One test may have to make several runs first; on a busy machine they take their time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Completed = Callable[[str, int], RunFolder]
Span = dict[str, Any]

SCHEDULES = ("serial", "gather", "overlap")
NUM_RANKS = pytest.mark.parametrize("num_actor_ranks", [1, 2])


def intersect(one: Span, other: Span) -> bool:
    return max(one["start"], other["start"]) < min(one["end"], other["end"])


def the_span(folder: RunFolder, name: str, step: int) -> Span:
    (span,) = [span for span in folder.spans() if (span["name"], span["step"]) == (name, step)]
    return span


@NUM_RANKS
def test_weights_are_bit_identical_under_every_schedule(completed: Completed, num_actor_ranks: int) -> None:
    digests = [completed(schedule, num_actor_ranks).summary["weights_sha256"] for schedule in SCHEDULES]
    assert None not in digests[0].values()
    assert digests == digests[:1] * 3


@NUM_RANKS
def test_every_step_reports_the_same_learning_under_every_schedule(completed: Completed, num_actor_ranks: int) -> None:
    def learning(schedule: str) -> list[dict[str, float]]:
        names = ("actor/loss", "actor/grad_norm", "critic/loss", "critic/score/mean", "actor/reward_kl_penalty_coeff")
        lines = completed(schedule, num_actor_ranks).metrics[1:]
        return [{name: line[name] for name in names} for line in lines]

    serial = learning("serial")
    assert len(serial) == NUM_STEPS
    assert learning("gather") == serial
    assert learning("overlap") == serial


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_run_leaves_every_step_and_validation_on_record(completed: Completed, schedule: str) -> None:
    folder = completed(schedule, 1)
    assert folder.steps == list(range(NUM_STEPS + 1))
    assert [line["step"] for line in folder.metrics if "val/accuracy" in line] == [0, 2, 4]
    assert folder.summary["global_step"] == NUM_STEPS
    validation = folder.summary["validation"]
    assert validation["before"]["overall"] == pytest.approx(folder.metrics[0]["val/accuracy"])
    assert validation["after"]["overall"] == pytest.approx(folder.metrics[-1]["val/accuracy"])
    assert folder.committed_steps == [NUM_STEPS]


def test_adaptive_kl_coefficient_moves_in_every_step(completed: Completed) -> None:
    coefficients = [line["actor/reward_kl_penalty_coeff"] for line in completed("gather", 1).metrics[1:]]
    assert len(set(coefficients)) == NUM_STEPS


@NUM_RANKS
def test_nothing_intersects_in_serial(completed: Completed, num_actor_ranks: int) -> None:
    spans = [span for span in completed("serial", num_actor_ranks).spans() if span["pool"] != "controller"]
    assert {span["pool"] for span in spans} == {"actor", "critic", "reward"}
    assert [pair for pair in combinations(spans, 2) if intersect(*pair)] == []


@NUM_RANKS
def test_both_updates_of_every_step_intersect_in_gather(completed: Completed, num_actor_ranks: int) -> None:
    folder = completed("gather", num_actor_ranks)
    for step in range(1, NUM_STEPS + 1):
        assert intersect(the_span(folder, "update_actor", step), the_span(folder, "update_critic", step)), step


@NUM_RANKS
def test_critic_update_intersects_the_next_generation_in_overlap(completed: Completed, num_actor_ranks: int) -> None:
    folder = completed("overlap", num_actor_ranks)
    for step in range(1, NUM_STEPS):
        assert intersect(the_span(folder, "update_critic", step), the_span(folder, "gen", step + 1)), step


@NUM_RANKS
def test_values_wait_for_the_critic_update_before_them_in_overlap(completed: Completed, num_actor_ranks: int) -> None:
    folder = completed("overlap", num_actor_ranks)
    for step in range(1, NUM_STEPS):
        assert the_span(folder, "update_critic", step)["end"] <= the_span(folder, "values", step + 1)["start"], step


def test_two_actor_ranks_share_the_tokens_of_every_update(completed: Completed) -> None:
    for line in completed("gather", 2).metrics[1:]:
        assert line["actor/tokens_rank_min"] >= 0.4 * (line["actor/tokens_rank_min"] + line["actor/tokens_rank_max"])


def test_controller_trains_where_torch_cannot_be_imported(completed: Completed) -> None:
    # conftest.py runs this one with torch and transformers made impossible to import.
    without_torch, with_torch = completed("serial", 1), completed("gather", 1)
    assert without_torch.summary["weights_sha256"] == with_torch.summary["weights_sha256"]
