"""Conversations between a scripted actor and environments that are functions: what is replied, rewarded and learned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.conversations.conversation import (
    Conversation,
    EnvironmentsFailed,
    check_lost,
    conversation_metrics,
    waited_for,
    warn_of_no_rewards,
    without_lost,
)
from controller.conversations.environments import Environments
from controller.data.privileged_prompts import PrivilegedPrompts
from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch
from controller.data.tokenizer import load_tokenizer
from controller.data.turn_tokens import TurnTokens
from controller.ppo.scores import Scores, Text, objects
from controller.sampling.keep import Groups
from controller.sampling.stream import SamplingGroups
from controller.step.context import StepContext
from controller.step.finished import FinishedRollouts, Origin
from controller.step.log_prob_check import LogProbCheck
from controller.step.parts import RowsSentOnce
from controller.step.rollouts import KeptRollouts, SampledRollouts
from controller.tracking.rollout_dump import rollout_rows
from controller.tracking.step_record import StepRecord
from controller.workers.worker_groups import Workers
from environments.messages import Answer, TurnLimits
from rewards.samples import Scored
from splitppo.batch import Batch, Column
from splitppo.config.subsections.multi_turn import MultiTurnConfig
from splitppo.rpc.errors import Place, Unavailable
from splitppo.run_folder.metrics import check_declared
from tests.support import models
from tests.support.call_log import CallLog
from tests.support.fake_services import FakeCritic, FakeScorer, make_config
from tests.support.scores import make_scores
from tests.support.talking import FunctionEnvironments, Speak, TalkingActor, TalkingRollout
from tests.support.user_tools import write

NUM_SAMPLES = 2
LIMIT = 24


def user(text: str) -> tuple[Mapping[str, Any], ...]:
    return ({"role": "user", "content": text},)


def three_turns(row: Mapping[str, Any], seed: int) -> Iterator[Answer]:
    """Says the seed's last digit after turn 1 and a letter after turn 2, and gives 1, 2 and 3 for the turns."""
    yield Answer()
    yield Answer(messages=user(str(seed % 10)), reward=1.0, num_calls=1)
    yield Answer(messages=user("b"), reward=2.0, notes={"effort": 0.5}, num_calls=2, num_bad_calls=1)
    yield Answer(is_over=True, reward=3.0, final={"score": 0.25, "won": True})


def says(*tokens: int) -> Speak:
    return lambda place, turn, so_far: tokens


class Run:
    """A step whose rollouts are sampled by a scripted actor, with two prompts and two samples of each.

    `template` is another chat template than that of the model.
    """

    def __init__(
        self,
        folder: Path,
        converse: Any,
        speak: Speak,
        *,
        num_parts: int = 1,
        template: str | None = None,
        **changes: Any,
    ) -> None:
        models.save_tokenizer(folder / "model")
        own_template = None if template is None else write(folder, template, "template.jinja")
        tokenizer = load_tokenizer(str(folder / "model"), chat_template=own_template)
        keys = {"rollout__multi_turn__environments": {"default": {"tools": ["x.py:f"]}}}
        keys |= {"data__max_response_length": LIMIT, "data__max_prompt_length": 30, **changes}
        config = make_config(folder / "run", rollout__stream_groups=num_parts, **keys)
        self.environments = FunctionEnvironments(converse)
        self.actor = TalkingActor(CallLog())
        self.actor.speak = speak  # type: ignore[method-assign]
        self.actor.committed_step = 2
        turn_tokens = TurnTokens(tokenizer, config.rollout.multi_turn.max_observation_length)
        workers = Workers.of(config, self.actor, None)
        own = Environments(config, self.environments, tokenizer, turn_tokens)
        self.step = StepContext(
            config,
            workers,
            SamplingGroups.of(config, workers, own),
            FakeScorer(self.actor.log),
            LogProbCheck(config.rollout, first_step=3),
            StepRecord(3, started_s=0.0),
            partial(asyncio.sleep, 0),
        )
        rows = [PromptRow(f"row {row}", f"go {row}", "a", "truth", {"row": row}) for row in range(2)]
        texts = [str(row.prompt) for row in rows]
        ids = [tokenizer.backend.encode(text).ids for text in texts]
        prompts = Column.from_rows(ids, np.dtype("<i4"))
        self.prompts = PromptBatch(np.arange(2), prompts, tuple(texts), tuple(rows))
        self.tokenizer = tokenizer

    def change(self, **changes: Any) -> None:
        """Gives the environments of the step other fields."""
        own = self.step.sampling.environments
        assert own is not None
        self.step = replace(self.step, sampling=replace(self.step.sampling, environments=replace(own, **changes)))

    def sample_by(self, rollout: TalkingRollout) -> None:
        """Has a rollout group sample the step, which is started again when it is lost."""
        workers = Workers.of(self.step.config, self.actor, None, rollout=rollout)
        own = self.step.sampling.environments
        sampling = SamplingGroups.of(self.step.config, workers, own, restart=rollout.restart)
        self.step = replace(self.step, workers=workers, sampling=sampling)

    async def rollouts(self) -> tuple[Batch, list[Conversation]]:
        """Samples; returns the rollouts and the conversations, by prompt, then sample."""
        stream = SampledRollouts.of_step(self.step, self.prompts)
        rollouts = await stream.generate()
        parts = stream.parts.items
        conversations = [one for part in parts for one in part.conversations]
        places = np.concatenate([part.places for part in parts])
        return rollouts, [conversations[index] for index in np.argsort(places)]


async def test_replies_are_in_the_response_and_masked(tmp_path: Path) -> None:
    run = Run(tmp_path, three_turns, says(5, 6, 7))
    rollouts, conversations = await run.rollouts()
    assert run.actor.conversations[0].reply_steps == 32
    for response, mask, one in zip(
        rollouts["responses"].rows(), rollouts["response_mask"].rows(), conversations, strict=True
    ):
        text = run.tokenizer.decode(response.tolist())
        turn = run.tokenizer.decode([5, 6, 7])
        assert text == f"{turn}{text[3]}{turn}b{turn}"
        assert mask.tolist() == [1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]
        assert (one.turn_rewards, one.turn_ends) == ((1.0, 2.0, 3.0), (2, 6, 10))
        assert (one.end_score, one.extra) == (0.25, {"effort": 0.5, "won": True})
        assert [message["role"] for message in one.messages] == ["assistant", "user"] * 2 + ["assistant"]
        assert (one.num_turns, one.num_calls, one.num_bad_calls, one.is_truncated) == (3, 3, 1, False)
    assert all(episode.is_abandoned for episode in run.environments.episodes)


async def test_samples_of_a_prompt_have_the_same_seed_and_the_fields_of_their_row(tmp_path: Path) -> None:
    run = Run(tmp_path, three_turns, says(5))
    await run.rollouts()
    assert [row for _, row, _ in run.environments.begun] == [
        {"data_source": "a", "ground_truth": "truth", "row": number} for number in (0, 0, 1, 1)
    ]
    seeds = [seed for *_, seed in run.environments.begun]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert all(0 <= seed < 2**31 for seed in seeds)
    again = Run(tmp_path, three_turns, says(5))
    await again.rollouts()
    assert [seed for *_, seed in again.environments.begun] == seeds


async def test_what_reset_says_belongs_to_the_prompt(tmp_path: Path) -> None:
    def told(row: Mapping[str, Any], seed: int) -> Iterator[Answer]:
        yield Answer(messages=user(f": {row['row'] + 3}"))
        yield Answer(is_over=True)

    rollouts, _ = await Run(tmp_path, told, says(5)).rollouts()
    run = Run(tmp_path, told, says(5))
    texts = [run.tokenizer.decode(prompt.tolist()) for prompt in rollouts["prompts"].rows()]
    assert texts == ["go 0: 3"] * 2 + ["go 1: 4"] * 2


def named(row: Mapping[str, Any], seed: int) -> Iterator[Answer]:
    """Names the row for the critic, or in row 1 something else than the critic reads."""
    yield Answer(privileged={"hidden": f"a{row['row']}"} if row["row"] == 0 else {"other": "a"})
    yield Answer(is_over=True)


async def test_the_critic_reads_what_an_environment_has_named_also_when_the_rollouts_were_stored(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, named, says(5))
    texts = PrivilegedPrompts("{hidden}", 8, run.tokenizer)
    run.step = replace(run.step, privileged=texts)
    rollouts, conversations = await run.rollouts()
    assert [one.privileged for one in conversations] == [{"hidden": "a0"}] * 2 + [{}] * 2
    for lost in (one.lost for one in conversations[2:]):
        assert lost.startswith("row 1: critic.privileged_prompt: there is no field 'hidden': ")
    assert rollouts["response_mask"].sums().tolist() == [1, 1, 0, 0]  # nothing is learned from those

    rows = {"prompt_indices": np.repeat(run.prompts.row_indices, 2), "texts": objects([Text("", "", "")] * 4)}
    scores = make_scores(np.zeros(4, np.float32), conversations=objects(conversations), **rows)
    groups = Groups(run.prompts, rollouts, scores)
    stored = FinishedRollouts(Origin(3, 2, 0, {}), groups, [(run.prompts, scores.scores)])
    for kept in (groups, FinishedRollouts.parse(stored.serialise(), run.prompts).groups):
        [part] = KeptRollouts(run.step, kept, []).parts.items
        critic = FakeCritic(CallLog())
        await RowsSentOnce(texts).send(critic, run.step.config.teacher, part)
        sent = await critic.get_batch(part.slot, ["privileged_tokens"])
        shown = [run.tokenizer.decode(tokens.tolist()) for tokens in sent["privileged_tokens"].rows()]
        assert shown == ["a0", "a0", "", ""]


async def test_rollouts_of_an_earlier_step_still_have_their_conversations(tmp_path: Path) -> None:
    """A reward model reads them then, also how they began."""

    def told(row: Mapping[str, Any], seed: int) -> Iterator[Answer]:
        yield Answer(messages=user(f": {row['row'] + 3}"))
        yield Answer(is_over=True)

    run = Run(tmp_path, told, says(5))
    rollouts, conversations = await run.rollouts()
    scores = make_scores(np.zeros(4, np.float32), conversations=objects(conversations))
    kept = KeptRollouts(run.step, Groups(run.prompts, rollouts, scores), [])
    [part] = kept.parts.items
    assert [row.begun_prompt for row in part.prompts.rows] == ["go 0: 3"] * 2 + ["go 1: 4"] * 2
    assert part.conversations == conversations


@pytest.mark.parametrize("num_parts", [1, 3])
async def test_a_reply_that_leaves_no_room_ends_the_conversation(tmp_path: Path, num_parts: int) -> None:
    ends: list[object] = []

    def talkative(row: Mapping[str, Any], seed: int) -> Iterator[Answer]:
        yield Answer()
        yield Answer(messages=user("b" * 10))
        ends.append((yield Answer(messages=user("c" * 10))))
        yield Answer(is_over=True, final={"score": 1.0})

    def speak(place: int, turn: int, so_far: Sequence[int]) -> Sequence[int]:
        return [4] * (2 + place)

    run = Run(tmp_path, talkative, speak, num_parts=num_parts)
    rollouts, conversations = await run.rollouts()
    # Tokens so far: 2 + 10 + 2 = 14, and 10 more leave no room for another one.
    assert rollouts["responses"].lengths.tolist() == [14, 16, 18, 20]
    assert [one.is_truncated for one in conversations] == [True] * 4
    assert [one.end_score for one in conversations] == [1.0] * 4
    assert ends == [None] * 4


async def test_an_empty_answer_without_a_template_ends_the_conversation(tmp_path: Path) -> None:
    def silent(row: Mapping[str, Any], seed: int) -> Iterator[Answer]:
        yield Answer()
        yield Answer(messages=user(""), limits=TurnLimits(max_tokens=2))
        yield Answer(is_over=True)

    _, conversations = await Run(tmp_path, silent, says(4)).rollouts()
    assert [(one.num_turns, one.is_truncated) for one in conversations] == [(1, False)] * 4


async def test_a_turn_that_fills_the_response_takes_no_reply(tmp_path: Path) -> None:
    run = Run(tmp_path, three_turns, says(*[4] * 40))
    rollouts, conversations = await run.rollouts()
    assert rollouts["responses"].lengths.tolist() == [LIMIT] * 4
    assert run.actor.replies == []
    assert [(one.num_turns, one.is_truncated, one.turn_rewards) for one in conversations] == [(1, True, (3.0,))] * 4


async def test_the_last_allowed_turn_ends_the_conversation(tmp_path: Path) -> None:
    run = Run(tmp_path, three_turns, says(4), rollout__multi_turn__max_turns=2)
    _, conversations = await run.rollouts()
    assert [(one.num_turns, one.is_truncated, one.turn_rewards) for one in conversations] == [
        (2, False, (1.0, 5.0))
    ] * 4


async def test_turns_that_are_told_twice_are_answered_once(tmp_path: Path) -> None:
    run = Run(tmp_path, three_turns, says(4))
    run.actor.says_twice = True
    _, conversations = await run.rollouts()
    assert [(reply.place, reply.turn) for reply in sorted(run.actor.replies, key=lambda r: (r.place, r.turn))] == [
        (place, turn) for place in range(4) for turn in (1, 2, 3)
    ]
    assert [one.num_turns for one in conversations] == [3] * 4


def failing(where: int) -> Callable[[Mapping[str, Any], int], Iterator[Answer]]:
    """Returns environments that fail in the conversations about the first prompt: at the start, or in a turn."""

    def converse(row: Mapping[str, Any], seed: int) -> Iterator[Answer]:
        for number in range(3):
            is_lost = row["row"] == 0 and number == where
            yield Answer(is_over=is_lost, lost="it broke" if is_lost else "", messages=user("b") if number else ())
        yield Answer(is_over=True, final={"score": 1.0})

    return converse


def test_tools_of_which_many_calls_fail_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Conversation(num_calls=2), Conversation(num_calls=2, num_timeouts=1, tool_error="add: timed out")
    scores = make_scores(np.zeros(2, np.float32), conversations=objects([good, bad]), places=objects("ab"))
    with caplog.at_level("WARNING"):
        check_lost(scores, MultiTurnConfig(max_error_rate=0.25), "step 3")
        assert caplog.messages == []
        check_lost(scores, MultiTurnConfig(max_error_rate=0.2), "step 3")
    assert caplog.messages == ["tools failed in 1 of 4 calls of step 3; first b: add: timed out"]


def test_agents_that_fail_after_an_answer_are_counted_and_end_the_run_if_all_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad, lost = Conversation(), Conversation(agent_error="run: no"), Conversation(lost="it broke")
    config = MultiTurnConfig.model_validate(
        {"environments": {"a": {"agent": "mine.py:run"}, "default": {"name": "openenv"}}, "max_error_rate": 1.0}
    )

    def scores(*talks: Conversation) -> Scores:
        names = objects(f"row {number}" for number in range(len(talks)))
        sources = objects("abaaa"[: len(talks)])
        zeros = np.zeros(len(talks), np.float32)
        return make_scores(zeros, conversations=objects(talks), places=names, data_sources=sources)

    with caplog.at_level("WARNING"):
        check_lost(scores(bad, good, bad, good), config, "step 3")
    assert caplog.messages == [
        "2 of 3 agents of step 3 failed after an answer of the policy; first row 0: run: no",
    ]
    assert conversation_metrics(objects([bad, good, bad]))["environment/num_agent_errors"] == 2.0
    with pytest.raises(EnvironmentsFailed, match=r"2 of 2 agents of step 3 failed after an answer .* row 0: run: no"):
        check_lost(scores(bad, good, bad, lost), config, "step 3")


def test_a_source_whose_environments_never_give_a_reward_is_named(caplog: pytest.LogCaptureFixture) -> None:
    none, some = Conversation(is_rewarded=False), Conversation(turn_rewards=(0.0,))
    talks = objects([none, some, none, none, None])
    scores = make_scores(np.zeros(5, np.float32), conversations=talks, data_sources=objects("aabcd"))
    with caplog.at_level("WARNING"):
        warn_of_no_rewards(scores, {"c"}, "step 3")
    assert caplog.messages == [
        "no conversation of data_source b in step 3 got a reward, so nothing is learned from it: its environment gave"
        " none, neither for a turn nor at the end (get_reward; of an agent, what it returns, prints or posts), and no"
        " scorer scores it (reward.scorers)"
    ]


@pytest.mark.parametrize(
    ("answers", "ended_by"),
    [
        ((Answer(), Answer(is_over=True, final={"score": 0.0})), "environment"),
        ((Answer(), Answer(messages=user("b" * 10)), Answer(messages=user("c" * 100)), Answer(is_over=True)), "length"),
        ((Answer(), *[Answer(messages=user("b"))] * 3, Answer(is_over=True)), "turns"),
    ],
)
async def test_a_conversation_says_what_ended_it_and_if_it_was_rewarded(
    tmp_path: Path, answers: Sequence[Answer], ended_by: str
) -> None:
    run = Run(tmp_path, lambda _row, _seed: (one for one in answers), says(4, 5), rollout__multi_turn__max_turns=3)
    _, conversations = await run.rollouts()
    assert {one.ended_by for one in conversations} == {one.facts["ended_by"] for one in conversations} == {ended_by}
    assert {one.is_rewarded for one in conversations} == {ended_by == "environment"}


@pytest.mark.parametrize("where", [0, 1, 2])
async def test_of_a_lost_conversation_nothing_is_learned(
    tmp_path: Path, where: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, failing(where), says(4, 5))
    rollouts, conversations = await run.rollouts()
    assert [one.lost for one in conversations] == ["it broke"] * 2 + [""] * 2
    masks = rollouts["response_mask"].rows()
    assert [bool(mask.any()) for mask in masks] == [False, False, True, True]
    assert [one.added_to(Scored(5.0), 8).total for one in conversations] == [0.0, 0.0, 6.0, 6.0]
    scores = make_scores(np.zeros(4, np.float32), conversations=objects(conversations), places=objects("abcd"))
    with caplog.at_level("WARNING"):
        check_lost(scores, MultiTurnConfig(max_error_rate=0.5), "step 3")
    assert caplog.messages == ["the environment failed in 2 of 4 conversations of step 3; first a: it broke"]
    assert without_lost(replace(scores, scores=np.ones(4, np.float32))).scores.tolist() == [0, 0, 1, 1]
    rows = list(rollout_rows(scores))
    assert [row["environment_error"] for row in rows] == ["it broke"] * 2 + [""] * 2
    assert [message["role"] for message in rows[3]["messages"]] == ["assistant", "user"] * 2 + ["assistant"]
    with pytest.raises(EnvironmentsFailed) as failed:
        check_lost(scores, MultiTurnConfig(max_error_rate=0.4), "step 3")
    assert str(failed.value) == (
        "the environment failed in 2 of 4 conversations of step 3, more than rollout.multi_turn.max_error_rate (0.4)"
        " allows; first a: it broke"
    )


async def test_messages_that_the_chat_template_refuses_lose_the_conversation(tmp_path: Path) -> None:
    def twice(row: Mapping[str, Any], seed: int) -> Iterator[Answer]:
        yield Answer()
        yield Answer(messages=(*user("a"), *user("b")))
        yield Answer(is_over=True, final={"score": 1.0})

    class Refusing(TurnTokens):
        def reply(self, messages: Any, *, last_token: int, is_templated: bool = True) -> Any:
            raise ValueError("roles must alternate")

    run = Run(tmp_path, twice, says(4))
    run.change(turn_tokens=Refusing(run.tokenizer, 100))
    rollouts, conversations = await run.rollouts()
    assert {one.lost for one in conversations} == {
        "what followed turn 1 cannot be said to the model: roles must alternate"
    }
    assert not rollouts["response_mask"].values.any()


async def test_an_attempt_after_the_loss_of_a_group_begins_new_conversations(tmp_path: Path) -> None:
    run = Run(tmp_path, three_turns, says(4), services__rollout={})

    class LostOnce(TalkingRollout):
        async def reply(self, slot: Any, replies: Any) -> None:
            if not self.restarts and any(reply.turn == 2 for reply in replies):
                raise Unavailable("gone", Place(role="rollout"))
            await super().reply(slot, replies)

    rollout = LostOnce(run.actor.log)
    run.sample_by(rollout)
    _, conversations = await run.rollouts()
    assert len(rollout.restarts) == 1
    assert len(run.environments.begun) == 8
    assert [one.num_turns for one in conversations] == [3] * 4
    assert all(episode.is_abandoned for episode in run.environments.episodes)


async def test_a_response_that_is_sampled_again_has_the_facts_of_its_own_conversation(tmp_path: Path) -> None:
    run = Run(tmp_path, three_turns, says(4), services__rollout={})

    class LostOnce(TalkingRollout):
        async def get_batch(self, slot: Any, columns: Any) -> Batch:
            if not self.restarts:
                self.speak = says(5, 6, 7)  # type: ignore[method-assign]
                raise Unavailable("gone", Place(role="rollout"))
            return await super().get_batch(slot, columns)

    rollout = LostOnce(run.actor.log)
    rollout.speak = says(4)  # type: ignore[method-assign]
    run.sample_by(rollout)
    _, conversations = await run.rollouts()
    assert [one.turn_ends for one in conversations] == [(2, 6, 10)] * 4


async def test_an_environment_that_begins_otherwise_in_another_attempt_is_lost(tmp_path: Path) -> None:
    run = Run(tmp_path, three_turns, says(4), services__rollout={})

    def other(row: Mapping[str, Any], seed: int) -> Iterator[Answer]:
        yield Answer(messages=user("first" if len(run.environments.begun) <= 4 else "second"))
        yield Answer(is_over=True)

    class LostOnce(TalkingRollout):
        async def get_batch(self, slot: Any, columns: Any) -> Batch:
            if not self.restarts:
                raise Unavailable("gone", Place(role="rollout"))
            return await super().get_batch(slot, columns)

    run.environments._converse = other
    rollout = LostOnce(run.actor.log)
    run.sample_by(rollout)
    _, conversations = await run.rollouts()
    assert [one.lost for one in conversations] == [
        f"row {row}: the environment began otherwise than before" for row in (0, 0, 1, 1)
    ]


async def test_what_was_given_before_the_first_turn_counts(tmp_path: Path) -> None:
    def early(row: Mapping[str, Any], seed: int) -> Iterator[Answer]:
        yield Answer(reward=0.5, notes={"level": 3.0}, is_over=row["row"] == 1, final={"score": 2.0})
        yield Answer(is_over=True, reward=1.0)

    _, conversations = await Run(tmp_path, early, says(4)).rollouts()
    assert [(one.turn_rewards, one.end_score, one.extra) for one in conversations[1:3]] == [
        ((1.5,), 2.0, {"level": 3.0}),
        ((0.5,), 2.0, {"level": 3.0}),
    ]


async def test_environments_that_have_begun_end_if_others_cannot_begin(tmp_path: Path) -> None:
    def broken(row: Mapping[str, Any], seed: int) -> Iterator[Answer]:
        if row["row"] == 1:
            raise RuntimeError("no")
        yield Answer()

    run = Run(tmp_path, broken, says(4))
    with pytest.raises(RuntimeError, match="no"):
        await run.rollouts()
    assert len(run.environments.episodes) > 1
    assert all(episode.is_abandoned for episode in run.environments.episodes)


def test_metrics_are_declared() -> None:
    one = Conversation(turn_ends=(3,), turn_rewards=(1.0,), num_calls=2, num_timeouts=1, num_returned=1)
    mask = Column.from_rows([[1, 1, 0, 1], [1]], np.dtype(np.uint8))
    segments = Column.from_rows([[], [1, 3, 8, 4]], np.dtype(np.int32))
    metrics = conversation_metrics(objects([one, one]), mask, segments)
    check_declared(metrics)
    assert [metrics[f"num_contexts/{name}"] for name in ("mean", "max", "min", "returned")] == [2.0, 3.0, 1.0, 2.0]
    assert [metrics[f"response_length/contexts/{name}"] for name in ("mean", "max", "min")] == [3.5, 7.0, 0.0]
    assert metrics["num_turns/mean"] == 1.0
    assert metrics["response_length/sampled/max"] == 3.0
    assert metrics["environment/num_timeouts"] == 2.0
    assert conversation_metrics(objects([None, None])) == {}


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (
            {"timing_s/wait_replies": 99.04, "environment/num_crashes": 22.0, "environment/num_timeouts": 3.0},
            "99 of 120 s for environments: 22 calls ended their process, 3 calls took too long",
        ),
        ({"timing_s/wait_replies": 0.25, "environment/num_crashes": 1.0}, "0.25 of 120 s for environments: 1 call"),
        ({"timing_s/wait_replies": 13.0, "environment/num_crashes": 0.0}, "13 of 120 s for environments"),
        ({"timing_s/environment": 13.0}, "13 of 120 s for environments"),
        ({"timing_s/wait_replies": 11.0, "timing_s/environment": 100.0}, ""),
        ({}, ""),
    ],
)
def test_a_step_says_how_long_it_waited_for_environments_and_why(metrics: dict[str, float], expected: str) -> None:
    said = waited_for({"timing_s/step": 120.0, **metrics})
    assert said.startswith(expected)
    assert bool(said) == bool(expected)
