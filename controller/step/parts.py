"""Defines rollouts that are still arriving, and the calls that score each part or compute a column once it is there."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from controller.conversations.conversation import check_lost, warn_of_no_rewards, without_lost
from controller.data.privileged_prompts import PrivilegedPrompts
from controller.data.prompts import PROMPT_COLUMNS, Answered, PromptBatch
from controller.ppo.distillation import teachers_of_rows
from controller.ppo.masked_stats import Float32s
from controller.ppo.scores import Scores
from controller.sampling.stream import GrowingList, Part, in_order, order_of
from controller.schedule import run_calls
from controller.scoring.adjustments import (
    add_model_scores,
    mark_truncated,
    subtract_overlong,
    without_model_scores,
    without_scores,
)
from controller.scoring.scorer import check_failures
from controller.step.context import StepContext
from controller.workers.clients import WorkerClient
from controller.workers.command import CommandReply
from rewards.source import FailureLimit
from splitppo.batch import Batch
from splitppo.config.sections.teacher import TeacherConfig
from splitppo.v1.batch_pb2 import Slot

Compute = Callable[..., Awaitable[CommandReply]]


class PendingRollouts(Protocol):
    """The responses to a batch of prompts while they are still arriving; complete rollouts are a `Batch`.

    Attributes:
        slot: the slot in which the workers keep the responses.
        prompts: the prompts, each once for all of its samples.
        scores: the scores of the responses before any penalty; None if the responses were not scored yet.
        greedy_scores: [num_prompts], the scores of greedy responses; None if there are none yet.
        on_actor: set when the actor has all responses; the controller may not have them yet.
        parts: the parts of the rollouts that have rows; it is complete once all have arrived.
    """

    slot: Slot
    prompts: PromptBatch
    scores: Scores | None
    greedy_scores: Float32s | None
    on_actor: asyncio.Event
    parts: GrowingList[Part]

    async def generate(self) -> Batch:
        """Puts the responses into the actor's slot; returns prompts and responses, ordered by prompt, then sample."""

    def answered(self, scores_B: Float32s) -> Sequence[Answered]:
        """Returns each batch of prompts that the actor answered for the step, with the scores of the responses.

        `scores_B` are the scores of the step's rows.
        """


class RowsSentOnce:
    """Sends each part of the rollouts to a group once, although several models of the group need it."""

    def __init__(self, privileged: PrivilegedPrompts | None = None) -> None:
        """Prepares sending; `privileged` makes what the value model alone reads, and is given for its group alone.

        What it has made is kept in `privileged_columns` for the record.
        """
        self._privileged = privileged
        self.privileged_columns: dict[int, Batch] = {}  # by part
        self._sent: set[int] = set()
        self._sending = asyncio.Lock()

    async def send(self, host: WorkerClient, teacher: TeacherConfig, part: Part) -> None:
        """Sends prompts and responses of one part to a group, or waits until another call has sent them.

        Those of conversations have their segments, also where no row of the part has any: all parts of a batch have the
        same columns. If there are several teachers, each row has the number of its own.
        """
        async with self._sending:
            if part.slot.part not in self._sent:
                names = (*PROMPT_COLUMNS, "responses", "segments", "places")
                rows = part.rollouts.select(name for name in names if name in part.rollouts)
                numbers = teachers_of_rows(teacher, [row.data_source for row in part.prompts.rows])
                privileged = await self._privileged_tokens(part)
                await host.put_batch(part.slot, rows.merge(numbers).merge(privileged))
                self._sent.add(part.slot.part)

    async def _privileged_tokens(self, part: Part) -> Batch:
        """Returns the column `privileged_tokens` of a part; no column for groups without a value model that reads it.

        Made in a thread, as texts may be long.
        """
        rows = part.prompts.rows
        if self._privileged is None:
            return Batch(len(rows), {})
        named = [None if one.lost else one.privileged for one in part.conversations] or [{}] * len(rows)
        column = await asyncio.to_thread(self._privileged.column, rows, named)
        self.privileged_columns[part.slot.part] = column
        return column


@dataclass(eq=False)
class PartCalls:
    """Scores each part of pending rollouts, or has a column computed for it; returns rows in the order of the prompts.

    Attributes:
        is_baseline: True if the scores serve only as the baseline of the step's rollouts (ReMax).
        is_learned_from: True if truncated responses are marked, and overlong responses get a penalty.
        asks_reward_model: True if the reward model, where the run has one, scores the responses, too.
        num_examine: the number of responses per data source that are logged.
    """

    step: StepContext
    rollouts: PendingRollouts
    is_baseline: bool = False
    is_learned_from: bool = False
    asks_reward_model: bool = True
    num_examine: int = 0

    def __post_init__(self) -> None:
        self._preparing_critic = asyncio.Lock()

    async def compute_columns(
        self,
        host: WorkerClient,
        name: str,
        send: Callable[[Part], Awaitable[None]],
        compute: Compute,
        columns: Sequence[str],
    ) -> Batch:
        """Sends each part to the worker group `host`, which computes columns for it; returns the columns of all rows.

        The critic's group first ends its update of the step before, and a rollout group on its devices ends sampling.
        The rows are sent meanwhile.
        """
        computed = []
        record = self.step.record
        async for part in self.rollouts.parts:
            await send(part)
            async with self.step.sampling.devices.turn_of(host.role):
                if host is self.step.workers.critic:
                    async with self._preparing_critic:  # one call alone waits, so that the time counts once
                        await self.step.after_critic_update()
                with record.timed(name):
                    reply = await compute(part.slot, base_step=self.step.base_step)
                    computed.append(await host.get_batch(part.slot, columns))
            record.add_reply(host.role, name, reply)
        return in_order(computed, self.rollouts.parts.items)

    async def generate_and_score(self) -> tuple[Batch, Scores]:
        """Generates the rollouts and scores them part by part; returns the rollouts and their scores."""
        rollouts, scores = await run_calls(self.step.config.run.schedule, self.rollouts.generate, self.scores)
        return rollouts, scores

    async def greedy_scores(self) -> Float32s:
        """Generates and scores greedy rollouts, a response to each prompt; returns the scores, [P], without penalties.

        They are ReMax's baseline.
        """
        _, greedy = await self.generate_and_score()
        self.step.record.metrics["critic/greedy_score/mean"] = float(greedy.scores.mean())
        return greedy.scores

    async def scores(self) -> Scores:
        """Scores each response by the reward functions, and by the reward model if there is one.

        Responses that have a score already are not scored again. With `teacher.only` all scores are 0.
        """
        config = self.step.config
        host = self.step.workers.reward_model
        if config.teacher.only:
            return without_lost(without_scores(await self._rule_scores()))
        if host is None or not self.asks_reward_model:
            return without_lost(await self._rule_scores())
        scores, of_model = await run_calls(config.run.schedule, self._rule_scores, lambda: self._model_scores(host))
        coefs = config.reward_model
        return without_lost(add_model_scores(scores, of_model, coefs.coef_of, rule_coef=coefs.rule_coef))

    async def _rule_scores(self) -> Scores:
        """Scores each response by the reward functions, with the penalty of overlong responses."""
        config = self.step.config
        earlier = self.rollouts.scores
        reward = config.reward
        limit = config.data.max_response_length
        parts: list[Scores] = []
        num_samples = 1 if self.is_baseline else config.rollout.n
        failures = FailureLimit(reward.max_error_rate * num_samples * self.rollouts.prompts.num_prompts)
        async for part in self.rollouts.parts:
            if earlier is not None:
                scores = without_model_scores(earlier)
            else:
                scores = await self._score(part, failures, num_examine=0 if parts else self.num_examine)
            if self.is_learned_from:
                lengths = part.rollouts["responses"].lengths
                scores = mark_truncated(scores, lengths, limit)
                scores = subtract_overlong(scores, reward.overlong_buffer, lengths, limit)
            parts.append(scores)
        scores = Scores.join(parts).take(order_of(self.rollouts.parts.items))
        if earlier is None:
            check_failures(scores, reward.max_error_rate, f"step {self.step.number}")
            check_lost(scores, config.rollout.multi_turn, f"step {self.step.number}")
            if not (config.teacher.only or self.is_baseline) and self.step.workers.reward_model is None:
                warn_of_no_rewards(scores, self.step.scorer.data_sources, f"step {self.step.number}")
        return scores

    async def _score(self, part: Part, failures: FailureLimit, *, num_examine: int) -> Scores:
        """Scores the responses of a part by the reward functions; with `teacher.only` none of them is asked.

        The time counts as timing_s/reward. `failures` ends the run early if too many responses fail.
        """
        with self.step.record.timed("reward"), self.step.record.span("scoring", "score"):
            return await self.step.scorer.score(
                part.prompts,
                part.rollouts,
                part.conversations,
                num_examine=num_examine,
                asks_functions=not self.step.config.teacher.only,
                limit=failures,
            )

    async def _model_scores(self, host: WorkerClient) -> Float32s:
        """Scores each response by the reward model, whose tokenizer encodes the texts anew; returns [B] float32."""
        earlier = self.rollouts.scores
        if earlier is not None and earlier.model_scores is not None:
            return earlier.model_scores
        scorer = self.step.scorer
        are_longest = list[bool]()

        async def send(part: Part) -> None:
            rows = await scorer.reward_rows(part.prompts, part.rollouts, part.conversations)
            are_longest.extend(length == scorer.max_reward_length for length in rows["reward_tokens"].lengths)
            await host.put_batch(part.slot, rows)

        scores = await self.compute_columns(host, "reward_model", send, host.compute_reward_scores, ["rm_scores"])
        if not self.is_baseline:
            self.step.record.metrics["reward/model_clip_ratio"] = sum(are_longest) / len(are_longest)
        return scores["rm_scores"].values
