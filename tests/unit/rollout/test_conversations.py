"""The actor's Generate with conversations on one rank: columns, turns, parts, and refused requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.actor.role import ActorRole
from services.runtime.command import CommandCancelled
from splitppo.batch import Batch, join_parts
from splitppo.rpc.errors import InvalidArgument
from splitppo.run_folder.metrics import check_declared
from splitppo.v1 import conversation_pb2
from tests.support.conversations import Script, ScriptedReplies, contexts_of, last, replies_of
from tests.support.models import VOCABULARY
from tests.support.roles import (
    N_SAMPLES,
    RecordedProgress,
    build_actor,
    call,
    command_of,
    context_of,
    generate_request,
    log_probs_request,
    prompts,
)
from tests.support.turns import ended_turn, turn_reply

LENGTH = 14
NUM_ROWS = 4 * N_SAMPLES


def request(
    *,
    num_parts: int = 0,
    max_turn_length: int = 4,
    reply_steps: int = 8,
    max_context_length: int = 0,
    first_turns: Sequence[conversation_pb2.FirstTurn] = (),
    with_log_probs: bool = False,
    **changes: Any,
) -> Any:
    conversation = conversation_pb2.Conversation(
        max_turn_length=max_turn_length,
        reply_steps=reply_steps,
        max_context_length=max_context_length,
        first_turns=first_turns,
        with_log_probs=with_log_probs,
    )
    changes = {"max_response_length": LENGTH, **changes}
    return generate_request(num_parts=num_parts, conversation=conversation, **changes)


def first_turns(*places: int, **limits: Any) -> list[conversation_pb2.FirstTurn]:
    made = conversation_pb2.TurnLimits(**limits)
    return [conversation_pb2.FirstTurn(place=place, limits=made) for place in places]


def talk(role: ActorRole, report: ScriptedReplies, **changes: Any) -> Batch:
    columns = call(role, "Generate", request(**changes), prompts(), report).columns
    assert columns is not None
    return columns


def scripted(num_turns: int = 3, **how: Any) -> ScriptedReplies:
    return ScriptedReplies(replies_of(num_turns, LENGTH), **how)


class OrderedReplies(ScriptedReplies):
    """Knows in what order turns and parts were reported."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.told: list[tuple[str, Sequence[int]]] = []

    def turns_ended(self, turns: Sequence[conversation_pb2.Turn]) -> None:
        super().turns_ended(turns)
        self.told.append(("turns", [turn.place for turn in turns]))

    def part_ready(self, part: int, columns: Batch, *, policy_version: int) -> None:
        super().part_ready(part, columns, policy_version=policy_version)
        self.told.append(("part", columns["places"].values.tolist()))


@pytest.mark.parametrize("num_parts", [0, 1])
def test_the_rows_have_a_mask_that_leaves_out_the_replies(model: Path, num_parts: int) -> None:
    report = scripted()

    rows = talk(build_actor(model), report, num_parts=num_parts)

    of_turns = {"response_mask", "segments"}
    assert set(rows.columns) == {"prompts", "seeds", "responses", "rollout_log_probs", *of_turns}
    assert not rows["segments"].values.size
    assert not report.parts
    assert {turn.place for turn in report.turns} == set(range(NUM_ROWS))
    assert max(turn.turn for turn in report.turns) == 3
    for place, (response, mask) in enumerate(zip(rows["responses"].rows(), rows["response_mask"].rows(), strict=True)):
        sampled = [token for turn in report.turns if turn.place == place for token in turn.tokens]
        assert response[mask == 1].tolist() == sampled
        assert mask[-1] == 1
        assert len(response) <= LENGTH
    replies = rows["response_mask"].values == 0
    assert replies.any()
    assert not rows["rollout_log_probs"].values[replies].any()


def test_contexts_that_begin_anew_are_told_in_a_column_and_are_no_sampled_tokens(model: Path) -> None:
    report = ScriptedReplies(contexts_of(5, LENGTH, max_context_length=0))
    limits = first_turns(*range(0, NUM_ROWS, 2), max_tokens=1)

    rows = talk(build_actor(model), report, first_turns=limits, with_log_probs=True, num_parts=2)

    assert {len(turn.tokens) for turn in report.turns if turn.turn == 1 and not turn.place % 2} == {1}
    assert max(rows["segments"].lengths) >= 4
    told: dict[int, list[float]] = {place: [] for place in range(NUM_ROWS)}
    for turn in report.turns:
        assert len(turn.log_probs) == len(turn.tokens)
        told[turn.place] += turn.log_probs
    for place, numbers in enumerate(rows["segments"].rows()):
        mask = rows["response_mask"].rows()[place]
        for start, length in numbers.reshape(-1, 2):
            assert mask[start - 1]
            assert not mask[start : start + length].any()
            assert mask[start + length]
        assert rows["rollout_log_probs"].rows()[place][mask == 1].tolist() == told[place]
    streamed = join_parts(list(report.parts.values()))
    assert streamed["segments"].values.tolist() == rows["segments"].values.tolist()


def test_log_probs_of_sampled_tokens_are_those_of_the_training_forward(model: Path) -> None:
    role = build_actor(model)
    rows = talk(role, scripted())

    trained = call(role, "ComputeLogProbs", log_probs_request(), rows).columns

    assert trained is not None
    sampled = rows["response_mask"].values == 1
    difference = trained["old_log_probs"].values - rows["rollout_log_probs"].values
    assert np.abs(difference[sampled]).max() < 1e-5


def test_every_turn_is_told_before_the_part_with_its_row_and_parts_have_the_mask(model: Path) -> None:
    report = OrderedReplies(replies_of(3, LENGTH))

    rows = talk(build_actor(model), report, num_parts=3)

    unfinished = set(range(NUM_ROWS))
    for kind, places in report.told:
        assert unfinished.issuperset(places)
        unfinished -= set(places) if kind == "part" else set()
    assert not unfinished
    streamed = join_parts(list(report.parts.values()))
    for name in ("responses", "rollout_log_probs", "response_mask"):
        assert streamed[name].values.tolist() == rows[name].values.tolist()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9}])
def test_conversations_that_end_after_one_turn_are_the_rows_without_conversations(model: Path, sampling: Any) -> None:
    rows = talk(build_actor(model), ScriptedReplies(last, most_late=3), max_turn_length=0, **sampling)
    plain = call(
        build_actor(model), "Generate", generate_request(max_response_length=LENGTH, **sampling), prompts()
    ).columns

    assert plain is not None
    assert "response_mask" not in plain
    assert rows["response_mask"].values.all()
    for name, column in plain.columns.items():
        assert rows[name].values.tobytes() == column.values.tobytes()


def test_the_time_in_which_replies_were_waited_for_is_a_declared_metric(model: Path) -> None:
    metrics = call(build_actor(model), "Generate", request(), prompts(), scripted(most_late=2)).metrics
    alone = call(build_actor(model), "Generate", generate_request(), prompts()).metrics

    assert metrics["timing_s/wait_replies"] >= 0.0
    assert "timing_s/wait_replies" not in alone
    check_declared(metrics)


def test_a_generation_cancelled_while_it_waits_leaves_an_actor_that_samples_the_same_afterwards(model: Path) -> None:
    role = build_actor(model)
    with pytest.raises(CommandCancelled):
        talk(role, ScriptedReplies(last, most_late=10**9, questions=30))
    again, fresh = talk(role, scripted()), talk(build_actor(model), scripted())

    assert again["responses"].values.tolist() == fresh["responses"].values.tolist()
    assert (again["response_mask"].values == 0).any()


def test_the_limits_of_replies_are_those_of_the_model_and_the_request(model: Path) -> None:
    messages = command_of(build_actor(model), "Generate").messages
    assert messages is not None
    assert not messages.are_exchanged(generate_request())
    assert messages.are_exchanged(request())

    router = messages.open(request(max_context_length=12), [Batch.from_rows(prompts=[[5] * 6], places=[[0]])])
    router.from_rank(0, conversation_pb2.TurnsEnded(turns=[ended_turn(0, 1, [1])]).SerializeToString())

    for tokens, sentence in (
        ([len(VOCABULARY)], f"a token id outside of 0 to {len(VOCABULARY) - 1}"),
        ([1] * (LENGTH - 1), f"the response would have {LENGTH} tokens, expected fewer than {LENGTH}"),
        ([1] * 5, "its context would have 12 tokens, expected fewer than 12"),
    ):
        reply = conversation_pb2.ReplyRequest(replies=[turn_reply(0, 1, tokens)])
        with pytest.raises(InvalidArgument, match=sentence):
            router.from_caller(reply)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_turn_length": -1}, "conversation.max_turn_length must be 0 or positive, got -1"),
        ({"reply_steps": -2}, "conversation.reply_steps must be 0 or positive, got -2"),
        ({"max_context_length": -3}, "conversation.max_context_length must be 0 or positive, got -3"),
        ({"max_context_length": 1}, r"conversation.max_context_length \(1\) must be over the longest prompt"),
        ({"first_turns": first_turns(0, 12)}, r"must name each of the places 0 to 11 at most once, got \[0, 12\]"),
        ({"first_turns": first_turns(2, 2)}, r"must name each of the places 0 to 11 at most once, got \[2, 2\]"),
        ({"first_turns": first_turns(3, max_tokens=-1)}, "the first turn of response 3: limits.max_tokens must be 0"),
        ({"first_turns": first_turns(3, stop=[""])}, "the first turn of response 3: limits.stop must have at most 16"),
    ],
)
def test_limits_out_of_range_are_refused(model: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        talk(build_actor(model), scripted(), **changes)


def test_forced_lengths_refuse_conversations(model: Path) -> None:
    forced = {"response_lengths": {"kind": "uniform", "low": 1, "high": 3}}
    role = ActorRole(context_of("actor", actor={"model": str(model), "lr": 1e-3}, debug=forced))

    with pytest.raises(ValueError, match=r"debug\.response_lengths forces the lengths of responses"):
        talk(role, scripted())
    assert call(role, "Generate", generate_request(), prompts(), RecordedProgress()).columns is not None
