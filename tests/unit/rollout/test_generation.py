"""The actor's Generate on one rank: its responses, and refused requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.generation import deal_prompts
from services.runtime.command import CommandCancelled
from splitppo.batch import Batch, join_parts
from tests.support.models import EOS
from tests.support.roles import (
    N_SAMPLES,
    RecordedProgress,
    build_actor,
    call,
    experience,
    generate_request,
    log_probs_request,
    prompts,
    update_request,
)


def test_generate_expands_prompts_to_samples_in_order(model: Path) -> None:
    outcome = call(build_actor(model), "Generate", generate_request(), prompts())

    assert outcome.columns is not None
    assert set(outcome.columns.columns) == {"prompts", "seeds", "responses", "rollout_log_probs"}
    assert outcome.columns.num_rows == 4 * N_SAMPLES
    assert outcome.columns["seeds"].values.tolist() == prompts()["seeds"].values.tolist()
    assert set(outcome.columns["seeds"].lengths) == {1}
    for index, row in enumerate(outcome.columns["prompts"].rows()):
        np.testing.assert_array_equal(row, prompts()["prompts"].rows()[index // N_SAMPLES])
    for row in outcome.columns["responses"].rows():
        assert len(row) == 6 or row[-1] == EOS


def test_streamed_parts_are_the_rows_of_the_whole_and_of_what_is_not_streamed_the_first_to_end_first(
    model: Path,
) -> None:
    report = RecordedProgress()
    outcome = call(build_actor(model), "Generate", generate_request(num_parts=3, base_step=2), prompts(), report)
    plain = call(build_actor(model), "Generate", generate_request(), prompts())

    assert outcome.columns is not None
    assert plain.columns is not None
    assert (outcome.policy_version, report.versions, plain.policy_version) == (2, {2}, 0)
    assert list(report.parts) == [1, 2, 3]
    assert [part.num_rows for part in report.parts.values()] == [6, 3, 3]
    lengths = [part["responses"].lengths for part in report.parts.values()]
    assert lengths[0].max() <= lengths[1].min()
    assert lengths[1].max() <= lengths[2].min()
    streamed = join_parts(list(report.parts.values()))
    for name in ("prompts", "responses", "rollout_log_probs"):
        assert streamed[name].values.tolist() == outcome.columns[name].values.tolist()
        assert streamed[name].values.tolist() == plain.columns[name].values.tolist()


def test_a_repeated_generation_cuts_the_same_parts(model: Path) -> None:
    def places() -> list[list[int]]:
        report = RecordedProgress()
        call(build_actor(model), "Generate", generate_request(num_parts=3), prompts(), report)
        return [part["places"].values.tolist() for part in report.parts.values()]

    assert places() == places()


@pytest.mark.parametrize("num_parts", [-1, 13])
def test_more_parts_than_responses_are_refused(model: Path, num_parts: int) -> None:
    with pytest.raises(ValueError, match=f"num_parts must be 0 .* to 12 responses, got {num_parts}"):
        call(build_actor(model), "Generate", generate_request(num_parts=num_parts), prompts())


def test_a_cancelled_generation_leaves_an_actor_that_generates_the_same_afterwards(model: Path) -> None:
    role = build_actor(model)
    with pytest.raises(CommandCancelled):
        call(role, "Generate", generate_request(), prompts(), RecordedProgress(questions=2))
    again = call(role, "Generate", generate_request(), prompts()).columns
    fresh = call(build_actor(model), "Generate", generate_request(), prompts()).columns

    assert again is not None
    assert fresh is not None
    assert again["responses"].values.tolist() == fresh["responses"].values.tolist()


def test_generation_after_an_update_uses_the_new_weights(model: Path) -> None:
    role = build_actor(model, lr=0.1)
    batch = experience(role)

    call(role, "Update", update_request(), batch)

    rollout = call(role, "Generate", generate_request(), prompts()).columns
    assert rollout is not None
    assert not np.array_equal(rollout["rollout_log_probs"].values, batch["rollout_log_probs"].values)
    recomputed = call(role, "ComputeLogProbs", log_probs_request(), rollout).columns
    assert recomputed is not None
    np.testing.assert_allclose(recomputed["old_log_probs"].values, rollout["rollout_log_probs"].values, atol=1e-5)


def test_generation_reports_the_time_of_a_weight_sync_where_there_was_one(model: Path) -> None:
    role = build_actor(model)

    def reported(step: int) -> set[str]:
        return set(call(role, "Generate", generate_request(base_step=step), prompts()).metrics)

    assert [reported(0), reported(0)] == [{"timing_s/update_weights"}, set()]
    call(role, "Update", update_request(1), experience(role))
    assert [reported(1), reported(1)] == [{"timing_s/update_weights"}, set()]
    role.load_checkpoint(None)
    assert reported(0) == {"timing_s/update_weights"}


def test_prompts_are_dealt_evenly() -> None:
    batch = Batch.from_rows(prompts=[[1] * length for length in (3, 9, 4, 8, 5)])

    shards = deal_prompts(batch, 2)

    assert [shard.tolist() for shard in shards] == [[0, 1, 4], [2, 3]]  # lengths 3, 9, 5 and 4, 8


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_k": -1}, "top_k must be"),
        ({"max_response_length": 0}, "max_response_length must be at least 1"),
        ({"max_response_length": 511}, "the model takes 512"),
    ],
)
def test_generate_refuses_sampling_out_of_range(model: Path, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(build_actor(model), "Generate", generate_request(**change), prompts())


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"prompts": [[5], []], "seeds": [[1], [2]]}, "the prompt of row 1 is empty"),
        ({"prompts": [[5], [999]], "seeds": [[1], [2]]}, r"column 'prompts', row 1: expected a token id in \[0, \d+\)"),
        ({"prompts": [[5], [-1]], "seeds": [[1], [2]]}, "column 'prompts', row 1: expected a token id"),
        ({"prompts": [[5], [6]], "seeds": [[1], [2, 3]]}, r"every prompt needs the same number of seeds.*\[1, 2\]"),
        ({"prompts": [[5]], "seeds": [[]]}, "every prompt needs the same number of seeds"),
        ({"prompts": [], "seeds": []}, "the batch has no rows"),
    ],
)
def test_generate_refuses_rows_that_it_cannot_sample_for(model: Path, columns: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(build_actor(model), "Generate", generate_request(), Batch.from_rows(**columns))
