"""The actor's Generate on one rank: its responses, and refused requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.actor.role import ActorRole
from services.rollout.begun_responses import BEGUN_COLUMNS
from services.rollout.generation import deal_prompts
from services.runtime.command import CommandCancelled
from splitppo.batch import Batch, join_parts
from splitppo.v1.conversation_pb2 import Conversation
from tests.support.models import EOS, VOCABULARY, save_tokenizer
from tests.support.roles import (
    N_SAMPLES,
    RecordedProgress,
    build_actor,
    call,
    context_of,
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


def one_row_each(samples: Batch) -> Batch:
    """Returns rows with one seed each, in place of prompts with several."""
    repeated = [prompt for prompt in samples["prompts"].rows() for _ in range(N_SAMPLES)]
    return Batch.from_rows(prompts=repeated, seeds=samples["seeds"].values[:, None])


def begun_by(cut: Batch) -> Batch:
    """Returns the rows of a generation that has cut its responses, as those of the next one."""
    begun = dict(zip(BEGUN_COLUMNS, (cut["responses"], cut["rollout_log_probs"]), strict=True))
    return (
        cut.select(("prompts", "seeds"))
        .merge(Batch(cut.num_rows, begun))
        .take(np.flatnonzero(cut["unfinished"].values))
    )


def test_responses_are_cut_say_so_and_go_on_with_the_same_weights_as_if_they_had_not_been(model: Path) -> None:
    role = build_actor(model)
    whole = call(role, "Generate", generate_request(max_response_length=60), one_row_each(prompts())).columns
    cut = call(role, "Generate", generate_request(max_response_length=60, max_step_tokens=20), prompts()).columns
    assert whole is not None
    assert cut is not None
    assert set(cut.columns) == {"prompts", "seeds", "responses", "rollout_log_probs", "unfinished"}
    rows = whole["responses"].rows()
    assert [row.tolist() for row in cut["responses"].rows()] == [row[:20].tolist() for row in rows]
    goes_on = [len(row) > 20 for row in rows]
    assert len(set(goes_on)) == 2
    assert cut["unfinished"].values.tolist() == goes_on

    rest = call(role, "Generate", generate_request(max_response_length=60), begun_by(cut)).columns

    assert rest is not None
    assert "unfinished" not in rest
    expected = whole.take(np.flatnonzero(goes_on))
    for name in ("prompts", "seeds", "responses"):
        assert rest[name].values.tolist() == expected[name].values.tolist()
    log_probs = rest["rollout_log_probs"].values, expected["rollout_log_probs"].values
    np.testing.assert_allclose(*log_probs, rtol=0, atol=1e-5)


def test_a_cancelled_generation_of_responses_that_go_on_can_be_repeated(model: Path) -> None:
    role = build_actor(model)
    cut = call(role, "Generate", generate_request(max_step_tokens=2), prompts()).columns
    assert cut is not None
    begun = begun_by(cut)
    again = [column.values.copy() for column in begun.columns.values()]
    with pytest.raises(CommandCancelled):
        call(role, "Generate", generate_request(max_step_tokens=3), begun, RecordedProgress(questions=2))

    assert [column.values.tolist() for column in begun.columns.values()] == [values.tolist() for values in again]
    made, fresh = (
        call(actor, "Generate", generate_request(max_step_tokens=3), begun).columns
        for actor in (role, build_actor(model))
    )
    assert made is not None
    assert fresh is not None
    assert [column.values.tobytes() for column in made.columns.values()] == [
        column.values.tobytes() for column in fresh.columns.values()
    ]


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


def test_responses_that_go_on_are_dealt_by_all_of_their_tokens() -> None:
    begun = [[1] * length for length in (0, 0, 9, 3, 1)]
    batch = Batch.from_rows(prompts=[[1] * length for length in (3, 9, 4, 8, 5)], begun_responses=begun)

    shards = deal_prompts(batch, 2)

    assert [shard.tolist() for shard in shards] == [[0, 1, 2], [3, 4]]  # lengths 13, 9, 3 and 11, 6


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_k": -1}, "top_k must be"),
        ({"max_response_length": 0}, "max_response_length must be at least 1"),
        ({"max_response_length": 511}, "the model takes 512"),
        ({"max_step_tokens": -1}, r"max_step_tokens must be 0 \(no limit\) or positive, got -1"),
        ({"max_step_tokens": 2, "num_parts": 2}, "num_parts must be 0 with max_step_tokens"),
        ({"max_step_tokens": 2, "conversation": Conversation()}, "expected no conversation with max_step_tokens"),
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


GOES_ON: dict[str, Any] = {
    "prompts": [[5], [6]],
    "seeds": [[1], [2]],
    "begun_responses": [[], [7, 8]],
    "begun_log_probs": [[], [-1.0, -0.5]],
}


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"begun_log_probs": None}, "expected the columns .* together, got only begun_responses"),
        ({"begun_responses": None}, "expected the columns .* together, got only begun_log_probs"),
        (
            {"begun_log_probs": [[], [-1.0]]},
            "row 1: expected a value for each of the 2 tokens of begun_responses, got 1",
        ),
        ({"begun_log_probs": [[], [-1.0, np.nan]]}, "'begun_log_probs', row 1: expected a finite number, got nan"),
        ({"begun_responses": [[], [7, 999]]}, r"'begun_responses', row 1: expected a token id in \[0, \d+\), got 999"),
        ({"begun_responses": [[], [7, -1]]}, "'begun_responses', row 1: expected a token id"),
        ({"seeds": [[1, 3], [2, 4]]}, "with begun_responses a row must have one seed, got 2"),
        (
            {"begun_responses": [[], [7] * 6], "begun_log_probs": [[], [-1.0] * 6]},
            r"max_response_length \(6\) tokens, got 6",
        ),
        ({"begun_responses": [[], [7, EOS]]}, "row 1: expected a response that goes on, but one of its tokens ends it"),
        ({"begun_responses": [[], [EOS, 7]]}, "row 1: expected a response that goes on, but one of its tokens ends it"),
    ],
)
def test_generate_refuses_tokens_after_which_no_response_can_go_on(model: Path, columns: Any, sentence: str) -> None:
    rows = {name: values for name, values in (GOES_ON | columns).items() if values is not None}
    with pytest.raises(ValueError, match=sentence):
        call(build_actor(model), "Generate", generate_request(), Batch.from_rows(**rows))


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"num_parts": 2}, "num_parts must be 0 with begun_responses and begun_log_probs"),
        ({"conversation": Conversation()}, "expected no conversation with begun_responses and begun_log_probs"),
    ],
)
def test_generate_refuses_to_go_on_in_parts_and_in_conversations(model: Path, request_: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(build_actor(model), "Generate", generate_request(**request_), Batch.from_rows(**GOES_ON))


def test_generate_refuses_to_go_on_behind_a_stop_text_or_a_forced_length(model: Path, tmp_path: Path) -> None:
    """The text and the length end the response that has begun, not its prompt."""
    save_tokenizer(tmp_path)
    a, b = (VOCABULARY.index(letter) for letter in "ab")
    begun = {"begun_responses": [[], [a, b]], "prompts": [[a, b], [6]]}
    rows = Batch.from_rows(**(GOES_ON | begun))
    data = {"train_files": "unused", "train_batch_size": 2, "max_response_length": 6, "tokenizer": str(tmp_path)}
    for ends in (
        {"rollout": {"stop": ["ab"]}},
        {"debug": {"response_lengths": {"kind": "uniform", "low": 2, "high": 2}}},
    ):
        actor = {"model": str(model), "ppo_mini_batch_size": 2}
        role = ActorRole(context_of("actor", actor=actor, data=data, **ends))
        with pytest.raises(ValueError, match="'begun_responses', row 1: expected a response that goes on"):
            call(role, "Generate", generate_request(), rows)
