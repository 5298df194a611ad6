"""The three schedules compute the same, and differ in the calls that run at the same time; also with streaming."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from splitppo.run_folder.metrics import METRICS, declared
from splitppo.run_folder.trace import read_trace
from tests.support.runs import NUM_LONG_STEPS, NUM_STEPS, RunFolder

# One test may have to make several runs first; on a busy machine they take their time.
pytestmark = pytest.mark.timeout(900)

Completed = Callable[[str, int], RunFolder]
Span = dict[str, Any]

SCHEDULES = ("serial", "gather", "overlap")
NUM_STEPS_ON = {1: NUM_STEPS, 2: NUM_LONG_STEPS}
NUM_RANKS = pytest.mark.parametrize("num_actor_ranks", [1, pytest.param(2, marks=pytest.mark.extended)])
NUM_STREAMED = 2


def intersect(span: Span, other: Span) -> bool:
    return max(span["start"], other["start"]) < min(span["end"], other["end"])


def the_spans(folder: RunFolder, name: str, step: int) -> list[Span]:
    """In the order in which they began."""
    found = [span for span in folder.spans() if (span["name"], span["step"]) == (name, step)]
    return sorted(found, key=lambda span: span["start"])


def the_span(folder: RunFolder, name: str, step: int) -> Span:
    (span,) = the_spans(folder, name, step)
    return span


@pytest.mark.promise("the same weights under every schedule")
@NUM_RANKS
def test_weights_are_bit_identical_under_every_schedule(completed: Completed, num_actor_ranks: int) -> None:
    digests = [completed(schedule, num_actor_ranks).summary["weights_sha256"] for schedule in SCHEDULES]
    assert None not in digests[0].values()
    assert digests == digests[:1] * 3


@NUM_RANKS
def test_every_step_reports_the_same_learning_under_every_schedule(completed: Completed, num_actor_ranks: int) -> None:
    def learning(schedule: str) -> list[dict[str, float | None]]:
        names = ("actor/loss", "actor/grad_norm", "critic/loss", "critic/score/mean", "actor/reward_kl_penalty_coeff")
        lines = completed(schedule, num_actor_ranks).metrics[1:]
        return [{name: line.get(name) for name in names} for line in lines]

    serial = learning("serial")
    assert len(serial) == NUM_STEPS_ON[num_actor_ranks]
    assert None not in serial[-1].values()
    assert learning("gather") == serial
    assert learning("overlap") == serial


@pytest.mark.promise("the run folder")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_run_leaves_every_step_and_validation_on_record(completed: Completed, schedule: str) -> None:
    folder = completed(schedule, 1)
    assert folder.steps == list(range(NUM_STEPS + 1))
    assert [line["step"] for line in folder.metrics if "val/accuracy" in line] == [0, 2, 4]
    assert folder.summary["global_step"] == NUM_STEPS
    validation = folder.summary["validation"]
    assert validation["before"]["overall"] == pytest.approx(folder.metrics[0]["val/accuracy"])
    assert validation["after"]["overall"] == pytest.approx(folder.metrics[-1]["val/accuracy"])
    assert folder.committed_steps == [2, 4]


def test_a_run_has_the_metrics_of_the_table_that_are_of_every_run_or_of_its_kind(completed: Completed) -> None:
    """By what the table says, no run of this kind has the others; `rollout_correction` compares the two here."""
    of_its_kind = {
        "with a critic",
        "algorithm.use_kl_in_reward",
        "after an update",
        *(f"steps that {what}" for what in ("update the model", "update the actor", "update the critic")),
        *(f"steps that {what}" for what in ("update both", "compare the two", "compute it", "wait for it")),
        "steps with a validation",
    }
    names = {name for line in completed("gather", 1).metrics for name in line} - {"step"}
    rows = [row for rows in METRICS.values() for row in rows]
    without = [name for row in rows if not row.when for name in spelled_out(row.names) if name not in names]
    assert without == []
    measured = [declared(name) for name in names]
    assert [row.names for row in rows if row.when in of_its_kind and row not in measured] == []
    assert [row.names for row in measured if row.when and row.when not in of_its_kind] == []


def spelled_out(names: str) -> list[str]:
    """Returns every name that a row with `{a,b}` stands for."""
    found = re.search(r"{(.*?)}", names)
    if found is None:
        return [names]
    return [name for word in found[1].split(",") for name in spelled_out(names.replace(found[0], word, 1))]


def test_adaptive_kl_coefficient_moves_in_every_step(completed: Completed) -> None:
    coefficients = [line["actor/reward_kl_penalty_coeff"] for line in completed("gather", 1).metrics[1:]]
    assert len(set(coefficients)) == NUM_STEPS


@NUM_RANKS
def test_nothing_intersects_in_serial(completed: Completed, num_actor_ranks: int) -> None:
    spans = [span for span in completed("serial", num_actor_ranks).spans() if span["pool"] != "controller"]
    # Both roles are brought to the initial models before the first step, under any schedule; a weight sync of a
    # millisecond or more, which slow cores have, is a part of its generation.
    spans = [span for span in spans if span["name"] not in ("load_checkpoint", "update_weights")]
    assert {span["pool"] for span in spans} == {"actor", "critic", "scoring"}
    assert len([span for span in spans if span["name"] == "values"]) == NUM_STREAMED * NUM_STEPS_ON[num_actor_ranks]
    assert [pair for pair in combinations(spans, 2) if intersect(*pair)] == []


@NUM_RANKS
def test_both_updates_of_every_step_intersect_in_gather(completed: Completed, num_actor_ranks: int) -> None:
    folder = completed("gather", num_actor_ranks)
    for step in range(1, NUM_STEPS_ON[num_actor_ranks] + 1):
        assert intersect(the_span(folder, "update_actor", step), the_span(folder, "update_critic", step)), step


@pytest.mark.promise("the critic's update hides")
@NUM_RANKS
def test_critic_update_intersects_the_next_generation_in_overlap(completed: Completed, num_actor_ranks: int) -> None:
    folder = completed("overlap", num_actor_ranks)
    for step in range(1, NUM_STEPS_ON[num_actor_ranks]):
        assert intersect(the_span(folder, "update_critic", step), the_span(folder, "gen", step + 1)), step


@NUM_RANKS
def test_values_wait_for_the_critic_update_before_them_in_overlap(completed: Completed, num_actor_ranks: int) -> None:
    folder = completed("overlap", num_actor_ranks)
    for step in range(1, NUM_STEPS_ON[num_actor_ranks]):
        values = the_spans(folder, "values", step + 1)
        assert the_span(folder, "update_critic", step)["end"] <= values[0]["start"], step


@NUM_RANKS
@pytest.mark.parametrize("schedule", ["gather", "overlap"])
def test_values_and_scores_of_the_first_part_begin_while_the_actor_generates(
    completed: Completed, schedule: str, num_actor_ranks: int
) -> None:
    folder = completed(schedule, num_actor_ranks)
    for step in range(1, NUM_STEPS_ON[num_actor_ranks] + 1):
        generation = the_span(folder, "gen", step)
        for name in ("values", "score"):
            first, _ = the_spans(folder, name, step)
            assert generation["start"] < first["start"] < generation["end"], (name, step)


@NUM_RANKS
def test_every_schedule_cuts_the_same_parts_which_hold_every_response_once(
    completed: Completed, num_actor_ranks: int
) -> None:
    def parts(schedule: str) -> list[Sequence[Sequence[int]]]:
        spans = read_trace(completed(schedule, num_actor_ranks).path / "trace.json")
        return [span.parts for span in spans if span.name == "gen"]

    serial = parts("serial")
    assert len(serial) == NUM_STEPS_ON[num_actor_ranks]
    for cut in serial:
        assert len(cut) == NUM_STREAMED
        assert sorted(place for part in cut for place in part) == list(range(sum(map(len, cut))))
        assert all(list(part) == sorted(part) for part in cut)
    assert any(max(first) > min(second) for first, second in serial)  # no slices of the prompts
    assert parts("gather") == serial
    assert parts("overlap") == serial


def test_two_actor_ranks_share_the_tokens_of_every_update(completed: Completed) -> None:
    lines = [line for line in completed("gather", 2).metrics if "actor/tokens_rank_min" in line]
    assert len(lines) == NUM_LONG_STEPS - 1
    for line in lines:
        assert line["actor/tokens_rank_min"] >= 0.4 * (line["actor/tokens_rank_min"] + line["actor/tokens_rank_max"])


@pytest.mark.promise("no torch in the controller")
def test_controller_trains_where_torch_cannot_be_imported(completed: Completed) -> None:
    # conftest.py runs this one with torch and transformers made impossible to import.
    without_torch, with_torch = completed("serial", 1), completed("gather", 1)
    assert without_torch.summary["weights_sha256"] == with_torch.summary["weights_sha256"]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_weights_are_those_of_a_run_that_does_not_stream(
    completed: Completed, unstreamed: RunFolder, role: str
) -> None:
    def weights(folder: RunFolder) -> dict[str, np.ndarray]:
        (file,) = folder.checkpoint(2).glob(f"{role}/**/model.safetensors")
        return load_file(file)

    ours, plain = weights(completed("gather", 1)), weights(unstreamed)
    assert ours.keys() == plain.keys()
    for name, values in ours.items():
        np.testing.assert_allclose(values, plain[name], atol=1e-5, rtol=1e-4, err_msg=name)


def test_every_response_is_scored_and_reported_once(completed: Completed, unstreamed: RunFolder) -> None:
    ours, plain = completed("gather", 1).metrics[1:3], unstreamed.metrics[1:]
    assert len(plain) == 2
    for name in ("critic/score/mean", "response_length/mean", "prompt_length/mean"):
        assert [line[name] for line in ours] == pytest.approx([line[name] for line in plain])
