"""Conversations with several contexts: what the policy sees, what the environment is told, and what ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.ppo.scores import Text, objects
from controller.sampling.history import Reply
from controller.sampling.keep import Groups
from controller.sampling.talk import TurnInbox
from controller.step.finished import FinishedRollouts, Origin
from controller.step.rollouts import KeptRollouts
from environments.messages import Answer, NoRoom, Room, Said, TurnLimits
from splitppo.batch import Batch
from splitppo.rpc.errors import Place, Unavailable
from splitppo.v1.batch_pb2 import Slot
from splitppo.v1.conversation_pb2 import TurnReply
from tests.support.scores import make_scores
from tests.support.talking import Speak, TalkingRollout
from tests.support.turns import ended_turn
from tests.unit.controller.sampling.test_talk import Run, says, user

# Five characters around each text, one token each, and the token that ends turns.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
OVER = Answer(is_over=True, final={"score": 1.0})

Told = Said | NoRoom | None
Conversing = Generator[Answer, Told, None]


def run_of(folder: Path, converse: Any, speak: Speak, **changes: Any) -> Run:
    keys: dict[str, Any] = {"data__max_response_length": 80, **changes}
    return Run(folder, converse, speak, template=TEMPLATE, **keys)


def narrow(folder: Path, converse: Any, speak: Speak, **changes: Any) -> Run:
    """A run whose contexts have at most 14 tokens."""
    keys = {"data__max_prompt_length": 10, "rollout__multi_turn__max_context_length": 14, **changes}
    return run_of(folder, converse, speak, **keys)


def texts_of(run: Run, response: Sequence[int], segments: Sequence[int]) -> list[str]:
    """The text of each segment of a response, with its special tokens."""
    starts = [0, *segments[::2], len(response)]
    backend = run.tokenizer.backend
    return [
        backend.decode([*map(int, response[start:end])], skip_special_tokens=False) for start, end in pairwise(starts)
    ]


def letters(place: int, turn: int, so_far: Sequence[int]) -> Sequence[int]:
    """Turn 1 says "a", turn 2 "b" and so on, and ends itself."""
    return [2 + turn, 1]


async def test_a_context_that_begins_anew_is_in_the_response_and_masked(tmp_path: Path) -> None:
    def compacting(row: Mapping[str, Any], seed: int) -> Conversing:
        yield Answer()
        messages = ({"role": "system", "content": "s"}, *user("u"))
        yield Answer(messages=messages, begins_context=True, reward=1.0)
        yield Answer(messages=user("v"))
        yield OVER

    run = run_of(tmp_path, compacting, letters)
    rollouts, conversations = await run.rollouts()
    context = "s:s<eos>u:u<eos>a:"
    for response, mask, segments, one in zip(
        *(rollouts[name].rows() for name in ("responses", "response_mask", "segments")), conversations, strict=True
    ):
        assert texts_of(run, response, segments) == ["a<eos>", f"{context}b<eos>u:v<eos>a:c<eos>"]
        assert segments.tolist() == [2, 10]
        assert mask.tolist() == [1, 1, *[0] * 10, 1, 1, *[0] * 6, 1, 1]
        assert (one.turn_ends, one.turn_rewards) == ((1, 13, 21), (1.0, 0.0, 0.0))
        assert [(message["role"], "begins_context" in message) for message in one.messages] == [
            ("assistant", False),
            ("system", True),
            ("user", False),
            ("assistant", False),
            ("user", False),
            ("assistant", False),
        ]
    assert [reply.begins_context for reply in run.actor.replies] == [reply.turn == 1 for reply in run.actor.replies]


async def test_a_return_to_an_earlier_turn_begins_a_context_of_the_same_tokens(tmp_path: Path) -> None:
    def returning(row: Mapping[str, Any], seed: int) -> Conversing:
        yield Answer()
        yield Answer(messages=user("p"))
        yield Answer(messages=user("q"), begins_context=True)
        yield Answer(messages=user("r"), after_turn=3)  # the latest one: no context begins
        yield Answer(messages=user("s"), after_turn=1)
        yield Answer(messages=user("t"), after_turn=3)
        yield Answer(messages=user("w"), after_turn=5)
        yield OVER

    run = run_of(tmp_path, returning, letters, rollout__multi_turn__max_turns=9, data__max_response_length=200)
    rollouts, conversations = await run.rollouts()
    response, segments, prompt = (rollouts[name].rows()[0] for name in ("responses", "segments", "prompts"))
    prompt_text = run.tokenizer.decode(prompt.tolist())
    assert texts_of(run, response, segments.tolist()) == [
        "a<eos>pb<eos>",
        "u:q<eos>a:c<eos>u:r<eos>a:d<eos>",
        f"{prompt_text}a<eos>se<eos>",
        "u:q<eos>a:c<eos>u:t<eos>a:f<eos>",
        f"{prompt_text}a<eos>se<eos>wg<eos>",
    ]
    assert segments[1::2].tolist() == [6, 7, 14, 10]
    assert conversations[0].num_returned == 3
    last_context = conversations[0].messages[-6:]
    assert [(message["content"], "begins_context" in message) for message in last_context] == [
        ("go 0", True),
        *((text, False) for text in ("a", "s", "e", "w", "g")),
    ]


async def test_an_environment_knows_the_tokens_of_a_turn_and_what_is_left(tmp_path: Path) -> None:
    told: list[Told] = []

    def asking(row: Mapping[str, Any], seed: int) -> Conversing:
        told.append((yield Answer()))
        told.append((yield Answer(messages=user("p"), limits=TurnLimits(max_tokens=7, stop=("c",)))))
        told.append((yield Answer(messages=user("q" * 6), begins_context=True)))
        yield OVER

    run = narrow(tmp_path, asking, lambda place, turn, so_far: [3 + turn] * turn)
    await run.rollouts()
    assert set(told) == {
        Said("b", "length", Room(14 - 5, 80 - 1), num_context_tokens=4, num_tokens=1),
        Said("cc", "stop", Room(14 - 8, 80 - 4), num_context_tokens=6, num_tokens=2),
        Said("ddd", "context", Room(14 - 14, 80 - 18), num_context_tokens=11, num_tokens=3),
    }
    limits = {reply.turn: reply.limits for reply in run.actor.replies}
    assert (limits[1].max_tokens, limits[1].stop) == (7, ["c"])
    assert not any(reply.HasField("limits") for reply in run.actor.replies if reply.turn > 1)


async def test_a_response_that_is_full_has_not_ended_by_its_context(tmp_path: Path) -> None:
    told: list[Told] = []

    def silent(row: Mapping[str, Any], seed: int) -> Conversing:
        told.append((yield Answer()))
        yield OVER

    run = narrow(tmp_path, silent, says(*[4] * 40), data__max_response_length=10)
    await run.rollouts()
    assert {said.ended_by for said in told if isinstance(said, Said)} == {"length"}


async def test_log_probs_are_told_with_the_text_of_each_token_if_the_answer_before_asks_for_them(
    tmp_path: Path,
) -> None:
    told: list[Told] = []

    def asking(row: Mapping[str, Any], seed: int) -> Conversing:
        told.append((yield Answer()))
        told.append((yield Answer(messages=user("p"), limits=TurnLimits(with_log_probs=True))))
        yield OVER

    code = {"default": {"path": "mine.py", "name": "converse"}}
    run = run_of(tmp_path, asking, says(4, 1), rollout__multi_turn__environments=code)
    await run.rollouts()
    assert {said.log_probs for said in told if isinstance(said, Said)} == {(), (("b", -0.5), ("", -0.5))}


async def test_what_has_no_room_in_its_context_is_not_said_and_another_answer_takes_its_place(tmp_path: Path) -> None:
    told_to_each: list[list[Told]] = []

    def pressed(row: Mapping[str, Any], seed: int) -> Conversing:
        told: list[Told] = []
        told_to_each.append(told)
        told.append((yield Answer()))
        told.append((yield Answer(messages=user("p" * 9), reward=1.0, notes={"tried": 1.0})))
        told.append((yield Answer(messages=user("q" * 10), begins_context=True)))
        told.append((yield Answer(messages=user("r" * 8), after_turn=1, reward=2.0)))
        told.append((yield Answer(messages=user("s"))))
        yield OVER

    run = narrow(tmp_path, pressed, letters)
    rollouts, conversations = await run.rollouts()
    no_room = [NoRoom(Room(8, 78), 9), NoRoom(Room(14, 78), 15), NoRoom(Room(8, 78), 8)]
    assert [told[1:4] for told in told_to_each] == [no_room] * 4
    assert texts_of(run, rollouts["responses"].rows()[0], []) == ["a<eos>sb<eos>"]
    assert rollouts["segments"].lengths.tolist() == [0] * 4
    assert {(one.num_turns, one.turn_rewards, one.is_truncated, one.lost) for one in conversations} == {
        (2, (3.0, 0.0), False, "")
    }
    assert conversations[0].extra["tried"] == 1.0
    assert [message["content"] for message in conversations[0].messages] == ["a", "s", "b"]


async def test_an_environment_that_ends_because_there_is_no_room_has_its_rewards_and_is_truncated(
    tmp_path: Path,
) -> None:
    def careless(row: Mapping[str, Any], seed: int) -> Conversing:
        yield Answer()
        yield Answer(messages=user("p" * 20), reward=1.0)
        yield OVER

    _, conversations = await narrow(tmp_path, careless, letters).rollouts()
    assert {(one.turn_rewards, one.end_score, one.is_truncated, one.ended_by, one.lost) for one in conversations} == {
        ((1.0,), 1.0, True, "length", "")
    }


async def test_an_environment_that_asks_for_what_has_no_room_again_and_again_is_truncated_with_its_rewards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stubborn(row: Mapping[str, Any], seed: int) -> Conversing:
        yield Answer()
        reward: float | None = 1.0
        while (yield Answer(messages=user("p" * 20), reward=reward)) is not None:
            reward = None
        yield OVER

    _, conversations = await narrow(tmp_path, stubborn, letters).rollouts()
    assert {(one.turn_rewards, one.end_score, one.is_truncated, one.lost) for one in conversations} == {
        ((1.0,), 1.0, True, "")
    }
    assert [record.getMessage() for record in caplog.records] == [
        "after a turn, 1000 answers of its environment did not fit into the context (environment/num_truncated)"
    ]


async def test_an_environment_that_shortens_its_history_step_by_step_goes_on(tmp_path: Path) -> None:
    def shortening(row: Mapping[str, Any], seed: int) -> Conversing:
        yield Answer()
        for length in range(40, 2, -1):
            if not isinstance((yield Answer(messages=user("p" * length))), NoRoom):
                break
        yield OVER

    _, conversations = await narrow(tmp_path, shortening, letters).rollouts()
    assert {(one.num_turns, one.end_score, one.lost) for one in conversations} == {(2, 1.0, "")}


async def test_a_context_that_does_not_fit_into_the_response_ends_it(tmp_path: Path) -> None:
    def long(row: Mapping[str, Any], seed: int) -> Conversing:
        yield Answer()
        yield Answer(messages=user("p" * 20), begins_context=True)
        yield OVER

    run = run_of(tmp_path, long, letters, data__max_response_length=27)
    rollouts, conversations = await run.rollouts()
    assert rollouts["responses"].lengths.tolist() == [2] * 4
    assert {(one.is_truncated, one.end_score, one.lost) for one in conversations} == {(True, 1.0, "")}
    run = run_of(tmp_path / "longer", long, letters, data__max_response_length=28)
    assert (await run.rollouts())[0]["responses"].lengths.tolist() == [28] * 4


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": ({"function": {"name": "f"}},)}, None),
        (
            {"tools": ({"function": {"name": "<eos>"}},)},
            "the schema of a tool spells '<eos>', which is a special token",
        ),
        ({"messages": ({"role": "user", "content": "<raise>"},)}, "the chat template refuses the messages: no"),
    ],
)
async def test_a_context_that_cannot_be_rendered_loses_the_conversation(
    tmp_path: Path, fields: dict[str, Any], reason: str | None
) -> None:
    def own(row: Mapping[str, Any], seed: int) -> Conversing:
        yield Answer()
        yield Answer(**{"messages": user("p"), "begins_context": True, **fields})
        yield OVER

    template = "{% if '<raise>' in messages[0].content %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    run = Run(tmp_path, own, letters, template=template, data__max_response_length=80)
    _, conversations = await run.rollouts()
    before = "what followed turn 1 cannot be said to the model: "
    for one in conversations:
        assert one.lost.startswith(before + reason) if reason else not one.lost


def restarting(messages: Sequence[Mapping[str, Any]], **fields: Any) -> Any:
    """Environments that begin with a context."""

    def converse(row: Mapping[str, Any], seed: int) -> Conversing:
        yield Answer(messages=tuple(messages), begins_context=True, **fields)
        yield Answer(messages=user("r"), after_turn=1)
        yield Answer(messages=user("s"), begins_context=True)
        yield Answer(messages=user("t"), after_turn=1)
        yield OVER

    return converse


async def test_a_context_as_the_first_word_replaces_the_prompt(tmp_path: Path) -> None:
    limits = TurnLimits(max_tokens=3)
    run = run_of(tmp_path, restarting([{"role": "system", "content": "s"}, *user("u")], limits=limits), letters)
    rollouts, conversations = await run.rollouts()
    context = "s:s<eos>u:u<eos>a:"
    for prompt, response, segments in zip(
        *(rollouts[name].rows() for name in ("prompts", "responses", "segments")), strict=True
    ):
        assert texts_of(run, prompt, []) == [context]
        assert texts_of(run, response, segments.tolist()) == [
            "a<eos>u:r<eos>a:b<eos>",
            "u:s<eos>a:c<eos>",
            f"{context}a<eos>u:t<eos>a:d<eos>",
        ]
    [request] = run.actor.conversations
    assert [(first.place, first.limits.max_tokens) for first in request.first_turns] == [(row, 3) for row in range(4)]
    rows = {"prompt_indices": np.array([0, 0, 1, 1])}
    texts = objects(Text(context, "ab", "truth") for _ in range(4))
    scores = make_scores(np.zeros(4, np.float32), conversations=objects(conversations), texts=texts, **rows)
    finished = FinishedRollouts(Origin(3, 2, 0, {}), Groups(run.prompts, rollouts, scores), [])
    resumed = FinishedRollouts.parse(finished.serialise(), run.prompts)
    assert resumed.groups.scores.texts.tolist() == texts.tolist()
    [part] = KeptRollouts(run.step, resumed.groups, []).parts.items
    assert part.rollouts["segments"].values.tolist() == rollouts["segments"].values.tolist()
    assert [row.begun_prompt for row in part.prompts.rows] == [[{"role": "system", "content": "s"}, *user("u")]] * 4


async def test_a_context_as_the_first_word_that_is_too_long_is_a_failure_of_its_environment(tmp_path: Path) -> None:
    run = run_of(tmp_path, restarting(user("u" * 26)), letters)
    rollouts, conversations = await run.rollouts()
    assert {one.lost for one in conversations} == {
        f"row {row}: the environment began with a context: it has 31 tokens, more than data.max_prompt_length (30)"
        for row in range(2)
    }
    assert texts_of(run, rollouts["prompts"].rows()[0], []) == ["go 0"]
    assert not rollouts["response_mask"].values.any()


async def test_an_environment_that_begins_with_another_context_in_another_attempt_is_lost(tmp_path: Path) -> None:
    run = run_of(tmp_path, None, letters, services__rollout={})

    def other(row: Mapping[str, Any], seed: int) -> Conversing:
        yield Answer(messages=user("u"), begins_context=True, tools=() if len(run.environments.begun) <= 4 else None)
        yield OVER

    class LostOnce(TalkingRollout):
        async def get_batch(self, slot: Any, columns: Any) -> Batch:
            if not self.restarts:
                raise Unavailable("gone", Place(role="rollout"))
            return await super().get_batch(slot, columns)

    run.environments._converse = other
    rollout = LostOnce(run.actor.log)
    rollout.speak = letters  # type: ignore[method-assign]
    run.sample_by(rollout)
    _, conversations = await run.rollouts()
    assert [one.lost for one in conversations] == [
        f"row {row}: the environment began otherwise than before" for row in (0, 0, 1, 1)
    ]


async def test_replies_that_are_too_long_for_one_request_travel_in_several() -> None:
    requests: list[list[int]] = []

    class Client:
        async def reply(self, slot: Any, replies: Sequence[TurnReply]) -> None:
            assert sum(reply.ByteSize() for reply in replies) < 2 << 20
            requests.append([reply.place for reply in replies])

    turns = TurnInbox(Client(), Slot(), 5)  # type: ignore[arg-type]
    long = Reply(tokens=[100_000] * 200_000, begins_context=True)
    replies = [long, Reply(tokens=[1]), Reply(), long, long]
    await asyncio.gather(*(turns.reply(ended_turn(place, 1, [5]), reply) for place, reply in enumerate(replies)))
    assert requests == [[0, 1, 2], [3], [4]]


async def test_hundreds_of_contexts_are_one_response(tmp_path: Path) -> None:
    def many(row: Mapping[str, Any], seed: int) -> Conversing:
        yield Answer()
        for number in range(250):
            yield Answer(messages=user(str(number % 10)), begins_context=True)
        yield OVER

    limits = {"rollout__multi_turn__max_turns": 2000, "data__max_response_length": 2100}
    rollouts, conversations = await run_of(tmp_path, many, says(4, 1), **limits).rollouts()
    assert rollouts["responses"].lengths.tolist() == [2 + 250 * (6 + 2)] * 4
    assert rollouts["segments"].lengths.tolist() == [500] * 4
    assert [one.num_turns for one in conversations] == [251] * 4
