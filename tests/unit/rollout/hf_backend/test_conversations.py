"""Conversations of several turns with the Hugging Face rollout backend, on tiny random models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from services.rollout.hf_backend.backend import HfRollout
from services.rollout.protocol import DecodingStep
from services.rollout.stopping import StopRule
from services.runtime.command import CommandCancelled
from splitppo.batch import Batch
from splitppo.v1.conversation_pb2 import FirstTurn, Turn, TurnLimits, TurnReply
from tests.support.conversations import (
    Script,
    ScriptedReplies,
    contexts_of,
    converse,
    last,
    replies_of,
    responses_of,
)
from tests.support.models import VOCABULARY, save_tokenizer
from tests.support.turns import ended_turn, turn_reply
from tests.unit.rollout.hf_backend.test_backend import (
    FAMILIES,
    VOCAB,
    backend,
    build,
    ending,
    random_prompts,
    saying,
    steps_of,
)

pytestmark = pytest.mark.slow

STOP = [3, 7]
LENGTH = 24
CONTEXT = 14
PROMPTS = random_prompts([5, 1, 9])
SEEDS = [[10 * row + sample for sample in range(3)] for row in range(3)]
# What a model says that goes from its last token back to 8 after a prompt that ends with 5 (6, and 7, which is a stop
# token), and after one that ends with 8.
WITHOUT_END = {VOCAB - 1: 8}
ENDS_AFTER_2, GOES_ON = ending(5), ending(8)


def converse_with(
    model: Any,
    report: ScriptedReplies,
    *,
    max_batch_size: int = 4,
    prompts: Sequence[Any] = PROMPTS,
    seeds: Sequence[Sequence[int]] = SEEDS,
    **settings: Any,
) -> list[DecodingStep]:
    rows = Batch.from_rows(prompts=prompts, seeds=seeds)
    settings = {"max_response_length": LENGTH, "reply_steps": 8, "max_turn_length": 5, **settings}
    return converse(backend(model, STOP, max_batch_size), rows, report, **settings)


def scripted(num_turns: int = 4, **how: Any) -> ScriptedReplies:
    return ScriptedReplies(replies_of(num_turns, LENGTH), **how)


def facts(steps: Sequence[DecodingStep]) -> Any:
    """Everything that must be repeated: in which step what ended, and every bit of the responses."""
    ends = [[[response.index for response in group] for group in (step.ended, step.turns)] for step in steps]
    return ends, [(item.tokens, item.log_probs.tobytes(), item.replies) for item in responses_of(steps)]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_whole_conversations_equal_those_of_a_plain_forward(family: str) -> None:
    model = build(family)

    responses = responses_of(converse_with(model, scripted()))

    assert max(len(response.replies) for response in responses) == 3
    for response in responses:
        ids = torch.from_numpy(np.concatenate([response.prompt, response.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -len(response.tokens) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(-1, ids[0, -len(response.tokens) :, None])[:, 0].numpy()
        np.testing.assert_allclose(response.log_probs, np.where(response.mask, expected, 0.0), atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_context_that_begins_anew_log_probs_are_those_of_a_forward_of_it_alone(family: str) -> None:
    model = build(family)
    report = ScriptedReplies(contexts_of(9, 60, CONTEXT))

    responses = responses_of(
        converse_with(model, report, max_response_length=60, max_context_length=CONTEXT, max_turn_length=8)
    )

    assert max(len(response.contexts) for response in responses) >= 4
    is_full: list[bool] = []
    for response in responses:
        starts = [0, *(context.start for context in response.contexts)]
        for segment, (start, stop) in enumerate(itertools.pairwise([*starts, len(response.tokens)])):
            before = response.prompt if segment == 0 else ()
            row = np.concatenate([before, response.tokens[start:stop]]).astype(np.int64)
            assert len(row) <= CONTEXT
            is_full.append(len(row) == CONTEXT)
            with torch.no_grad():
                log_probs = model(input_ids=torch.from_numpy(row)[None]).logits[0].float().log_softmax(-1)
            num_before = len(row) - (stop - start)
            # The first token of a later segment follows nothing; it is not sampled.
            expected = [log_probs[max(i - 1, 0), row[i]].item() for i in range(num_before, len(row))]
            mask = response.mask[start:stop]
            np.testing.assert_allclose(response.log_probs[start:stop], np.where(mask, expected, 0.0), atol=2e-5)
    assert any(is_full)


@pytest.mark.parametrize(
    "family", ["qwen2", "gemma3-hybrid-window", pytest.param("lfm2-convolution", marks=pytest.mark.extended)]
)
def test_tokens_depend_neither_on_the_batch_nor_on_when_replies_come(family: str) -> None:
    model = build(family)
    alone = [
        responses_of(converse_with(model, ScriptedReplies(at(row, sample)), prompts=[PROMPTS[row]], seeds=[[seed]]))
        for row in range(3)
        for sample, seed in enumerate(SEEDS[row])
    ]

    for reply_steps, max_batch_size in ((0, 64), (8, 4), (8, 1)):
        report = scripted(most_late=20, seed=1)
        together = responses_of(converse_with(model, report, max_batch_size=max_batch_size, reply_steps=reply_steps))
        assert [item.tokens for item in together] == [item.tokens for [item] in alone]
        assert [item.replies for item in together] == [item.replies for [item] in alone]


def at(row: int, sample: int) -> Script:
    """Answers the turns of place 0 like those of another place."""
    script = replies_of(4, LENGTH)

    def answer_as_there(turn: Turn) -> TurnReply:
        there = script(ended_turn(100 * row + sample, turn.turn, turn.tokens))
        return turn_reply(0, there.turn, there.tokens, is_last=there.is_last)

    return answer_as_there


def test_with_reply_steps_neither_the_order_nor_the_delay_of_replies_changes_a_bit() -> None:
    model = build()

    prompt, late, later = (
        facts(converse_with(model, scripted(most_late=most_late, seed=most_late), max_batch_size=5))
        for most_late in (0, 3, 50)
    )

    assert prompt == late == later


def test_without_reply_steps_what_is_there_goes_on_and_nobody_waits_while_rows_are_open() -> None:
    report = scripted(most_late=30)

    responses = responses_of(converse_with(build(), report, reply_steps=0, max_batch_size=64))

    assert len(responses) == 9
    assert max(len(response.replies) for response in responses) == 3
    assert 0.0 in report.waits
    assert not [phase for phase in report.phases if not phase.startswith("waiting for ")]


def test_a_conversation_whose_turns_are_the_last_ones_is_the_same_as_no_conversation_bit_for_bit() -> None:
    for family in ("qwen2", "lfm2-convolution"):
        model = build(family)
        stop = ends_some(model)
        rows = Batch.from_rows(prompts=PROMPTS, seeds=SEEDS)
        for reply_steps in (0, 8):
            report = ScriptedReplies(last, most_late=5)
            made = responses_of(
                converse(backend(model, stop, 4), rows, report, max_response_length=LENGTH, reply_steps=reply_steps)
            )
            plain = responses_of(list(steps_of(backend(model, stop, 4), PROMPTS, SEEDS, LENGTH)))

            assert [item.tokens for item in made] == [item.tokens for item in plain]
            assert [item.log_probs.tobytes() for item in made] == [item.log_probs.tobytes() for item in plain]
            assert all(item.mask.all() for item in made)
            assert max(len(item.tokens) for item in made) == LENGTH > min(len(item.tokens) for item in made)


def ends_some(model: Any) -> list[int]:
    """A stop token with which some responses to `PROMPTS` end early, and others do not."""
    free = [response.tokens for response in responses_of(list(steps_of(backend(model), PROMPTS, SEEDS, LENGTH)))]
    num_early = [sum(token in tokens[:-1] for tokens in free) for token in range(VOCAB)]
    return [min(range(VOCAB), key=lambda token: abs(num_early[token] - len(free) / 2))]


def test_a_turn_ends_at_a_stop_token_at_its_longest_length_or_with_the_response() -> None:
    report = ScriptedReplies(replies_of(20, LENGTH))

    responses = responses_of(converse_with(build(), report, max_turn_length=6))

    last_turns = {turn.place: turn for turn in report.turns}
    for turn in report.turns:
        is_over = turn is last_turns[turn.place]
        assert len(turn.tokens) <= 6
        assert turn.tokens[-1] in STOP or len(turn.tokens) == 6 or is_over
        assert not set(turn.tokens[:-1]) & set(STOP)
        assert is_over or not turn.is_last
    assert {turn.is_last for turn in last_turns.values()} == {True, False}
    for response, place in zip(responses, sorted(last_turns), strict=True):
        assert last_turns[place].is_last == (len(response.tokens) == LENGTH)
        told = [turn for turn in report.turns if turn.place == place]
        assert [turn.turn for turn in told] == list(range(1, len(response.replies) + 2))
        assert np.array_equal(
            np.concatenate([turn.tokens for turn in told]), np.array(response.tokens)[response.mask > 0]
        )
        assert response.mask[-1] == 1


def test_a_stop_text_ends_the_turn_in_which_it_begins(tmp_path: Path) -> None:
    """Its letters in a reply, or half in a reply and half in the turn after it, end nothing."""
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = saying({})
    rollout = HfRollout(
        lambda: nullcontext(model),
        stop_rule=StopRule([], ["bcd", "efg", "gh", "kl"], tokenizer),
        max_batch_size=4,
        device=torch.device("cpu"),
    )
    reply = tokenizer("efg")["input_ids"]
    report = ScriptedReplies(lambda turn: answer(turn, reply if turn.turn == 1 else []))
    rows = Batch.from_rows(prompts=[ending(VOCABULARY.index("a"))], seeds=[[17]])
    [response] = responses_of(converse(rollout, rows, report, max_response_length=LENGTH))

    assert tokenizer.decode(response.tokens) == "bcdefghijkl"
    assert response.mask.tolist() == [1] * 3 + [0] * 3 + [1] * 5


def test_a_turn_ends_by_limits_of_its_own_and_the_next_one_does_not(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rollout = HfRollout(
        lambda: nullcontext(saying({})),
        stop_rule=StopRule([], ["st"], tokenizer),
        max_batch_size=4,
        device=torch.device("cpu"),
    )
    [start] = tokenizer("b")["input_ids"]
    limits = [TurnLimits(max_tokens=2), TurnLimits(stop=["ef", "i"]), TurnLimits()]
    report = ScriptedReplies(
        lambda turn: TurnReply(
            place=turn.place,
            turn=turn.turn,
            tokens=[start] if turn.turn < 4 else (),
            is_last=turn.turn == 4,
            limits=limits[turn.turn - 1] if turn.turn < 4 else None,
            begins_context=turn.turn == 3,
        )
    )
    rows = Batch.from_rows(prompts=[ending(start)], seeds=[[17]])
    first = FirstTurn(place=0, limits=TurnLimits(stop=["x", "g"], max_tokens=9))
    converse(rollout, rows, report, max_response_length=40, first_turns=[first])

    assert [tokenizer.decode(turn.tokens) for turn in report.turns] == ["cdefg", "cd", "cdef", "cdefghijklmnopqrst"]


def test_a_turn_is_sampled_with_the_numbers_of_its_positions_in_the_response() -> None:
    """A later turn equals the end of a response whose beginning happens to be the same tokens."""
    model, seeds = build(), [[5]]
    [whole] = responses_of(list(steps_of(backend(model), [PROMPTS[0]], seeds, LENGTH)))
    reply = whole.tokens[6:9].tolist()

    report = ScriptedReplies(lambda turn: answer(turn, reply if turn.turn == 1 else []))
    rows = Batch.from_rows(prompts=[PROMPTS[0]], seeds=seeds)
    [response] = responses_of(converse(backend(model), rows, report, max_response_length=LENGTH, max_turn_length=6))

    assert response.tokens == whole.tokens[:15]
    assert response.mask.tolist() == [1] * 6 + [0] * 3 + [1] * 6


def answer(turn: Turn, tokens: Sequence[int]) -> TurnReply:
    return turn_reply(turn.place, turn.turn, tokens, is_last=not tokens)


def test_a_turn_goes_on_so_many_decoding_steps_after_it_ended() -> None:
    """Two rows of which one ends its turn early: the other one's steps are the clock."""
    model = saying(WITHOUT_END)
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    report = ScriptedReplies(lambda turn: answer(turn, [8, 9, 10] if turn.turn == 1 else []), most_late=9)
    rows = Batch.from_rows(prompts=[ENDS_AFTER_2, GOES_ON], seeds=[[0], [1]])
    converse(backend(model, STOP), rows, report, max_response_length=LENGTH, reply_steps=5)

    prompt, *decoded = shapes
    joined = decoded.index((1, 5 + 2 + 3))
    assert prompt == (2, 5)
    assert decoded[:joined] == [(2, 1)] + [(1, 1)] * 6  # the turn has 2 tokens, and goes on after 5 more steps
    assert decoded[joined + 1] == (2, 1)


def test_a_single_turn_waits_for_others_to_join_with_but_not_for_the_end_of_long_rows() -> None:
    model = saying(WITHOUT_END)
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    report = ScriptedReplies(lambda turn: answer(turn, [8, 9, 10] if turn.turn == 1 else []))
    rows = Batch.from_rows(prompts=[ENDS_AFTER_2, GOES_ON], seeds=[[0], list(range(1, 11))])
    converse(backend(model, STOP), rows, report, max_response_length=LENGTH, reply_steps=2)

    joined = shapes.index((1, 5 + 2 + 3))
    assert joined < LENGTH - 2
    assert shapes[joined + 1] == (11, 1)


def test_a_cancelled_wait_ends_generation_and_the_backend_stays_usable() -> None:
    rollout = backend(build(), STOP)
    rows = Batch.from_rows(prompts=PROMPTS, seeds=SEEDS)
    silent = ScriptedReplies(last, most_late=10**9, questions=100)

    with pytest.raises(CommandCancelled):
        converse(rollout, rows, silent, max_response_length=LENGTH, reply_steps=8)

    assert silent.phases[-1].startswith("waiting for ")
    assert max(silent.waits) == 0.5
    again, fresh = (
        facts(converse(engine, rows, scripted(), max_response_length=LENGTH, reply_steps=8))
        for engine in (rollout, backend(build(), STOP))
    )
    assert again == fresh


def test_progress_counts_replies_and_ends_complete() -> None:
    steps = converse_with(build(), scripted())

    done = [step.done for step in steps]
    assert done == sorted(done)
    assert {step.total for step in steps} == {9 * LENGTH}
    assert done[-1] == 9 * LENGTH
