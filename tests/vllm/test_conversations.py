"""Conversations of several turns with vLLM against the policy itself: the same tokens in every turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.models import EOS
from tests.vllm.conftest import Found
from tests.vllm.inputs import NUM_PROMPTS
from tests.vllm.worker import TURN_LENGTH

pytestmark = pytest.mark.vllm

MAX_LOG_PROB_DIFF = 1e-5


@pytest.fixture(params=["alone", "shared_engine"])
def found_contexts(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank found in the scenario `contexts`."""
    if request.param == "alone":
        alone: Callable[[str], dict[str, Any]] = request.getfixturevalue("alone")
        return [alone("contexts")]
    ranks: Found = request.getfixturevalue(request.param)
    return [rank["contexts"] for rank in ranks]


@pytest.fixture(
    params=[
        *("alone", "shared_engine"),
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("replicas", "replicas_of_two")),
    ]
)
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank found in the scenario `conversations`."""
    if request.param == "alone":
        alone: Callable[[str], dict[str, Any]] = request.getfixturevalue("alone")
        return [alone("conversations")]
    ranks: Found = request.getfixturevalue(request.param)
    return [rank["conversations"] for rank in ranks]


def test_every_turn_has_the_tokens_of_the_policys_own_engine(found: list[dict[str, Any]]) -> None:
    assert sorted(row for rank in found for row in rank["rows"]) == list(range(NUM_PROMPTS))
    for rank in found:
        for run in rank["runs"]:
            assert run["vllm"] == run["hf"] == rank["runs"][0]["vllm"]
            assert sorted(run["turns"]) == sorted(run["hf_turns"]) == sorted(rank["runs"][0]["turns"])
        assert not rank["rows"] or max(turn for _, turn, *_ in rank["runs"][0]["turns"]) == 4


def test_contexts_that_begin_anew_and_limits_of_turns_are_those_of_the_policys_own_engine(
    found_contexts: list[dict[str, Any]],
) -> None:
    """Turns end by their own texts, by their own lengths and where a context is full."""
    assert any(rank["rows"] for rank in found_contexts)
    for rank in found_contexts:
        for run in rank["runs"]:
            assert run["vllm"] == run["hf"]
            assert sorted(run["turns"]) == sorted(run["hf_turns"])
            assert bool(run["vllm"][1]) == bool(rank["rows"])
            assert run["log_prob_diff"] <= MAX_LOG_PROB_DIFF


def test_log_probs_of_whole_conversations_are_those_of_the_training_forward(found: list[dict[str, Any]]) -> None:
    assert max(run["log_prob_diff"] for rank in found for run in rank["runs"]) <= MAX_LOG_PROB_DIFF
    for rank in found:
        for run in rank["runs"]:
            of_replies = [value for value, mask in zip(run["log_probs"], run["vllm"][1], strict=True) if not mask]
            assert not any(of_replies)
            assert bool(of_replies) == bool(rank["rows"])


def test_with_reply_steps_the_delay_of_replies_changes_neither_the_order_of_turns_nor_a_bit(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        prompt, late = (run for run in rank["runs"] if run["reply_steps"] == 8)
        assert prompt["turns"] == late["turns"]
        assert prompt["log_probs"] == late["log_probs"]


def test_an_engine_whose_command_is_cancelled_while_it_waits_goes_on(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["again"] == rank["runs"][0]["vllm"][0]
        assert not rank["rows"] or rank["cancelled_in"].startswith("waiting for ")


def test_a_stop_text_ends_the_turn_in_which_it_begins(shared_engine: Found) -> None:
    """The policy's engine ends the same turns; these are the ones that neither their length nor a stop token ended."""
    turns = shared_engine[0]["conversations"]["runs"][0]["turns"]
    by_text = {
        (place, turn)
        for place, turn, tokens, is_last in turns
        if len(tokens) < TURN_LENGTH and tokens[-1] != EOS and not is_last
    }
    assert {(place, turn + 1) for place, turn in by_text} & by_text
