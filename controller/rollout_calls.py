"""The calls that make and score rollouts: a step's, candidates for it, greedy ones; each one timed and recorded."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from controller.ppo.masked_stats import Float32s
from controller.rollout.results import ScoredResponses
from controller.rollout.scoring import Scorer
from controller.rollout.stream import Rollouts, StreamPart
from controller.schedule import run_calls
from controller.tracking.step_record import StepRecord
from controller.workers.client import WorkerClient
from controller.workers.command import CommandReply
from controller.workers.worker_groups import Workers
from splitppo.batch import Batch
from splitppo.config import Config

AfterUpdate = Callable[[], Awaitable[None]]
Compute = Callable[..., Awaitable[CommandReply]]


@dataclass(eq=False)
class RolloutCalls:
    """What any rollouts go through. Every call answers in the order of the prompts.

    Attributes:
        after_update: waits for the critic's update of the step before; called before the critic's group computes.
        is_baseline: they are only compared with, and so timed apart.
        is_learned_from: those that were cut off are marked then, and overlong ones lose some of their score.
        asks_model: whether the reward model scores, where there is one.
        num_examine: responses per data source that are logged.
    """

    config: Config
    workers: Workers
    scorer: Scorer
    record: StepRecord
    rollouts: Rollouts
    after_update: AfterUpdate
    is_baseline: bool = False
    is_learned_from: bool = False
    asks_model: bool = True
    num_examine: int = 0

    def __post_init__(self) -> None:
        self._base_step = self.rollouts.slot.step - 1
        self._preparing_critic = asyncio.Lock()

    async def generate(self, on_generated: Callable[[], None] = lambda: None) -> Batch:
        """Actor: prompts and responses, ordered by prompt, then sample; `on_generated` as in `Rollouts`."""
        with self.record.timed("gen_max" if self.is_baseline else "gen"):
            rollouts, reply = await self.rollouts.generate(on_generated=on_generated)
        if reply is not None:
            parts = [places.tolist() for places in self.rollouts.places]
            self.record.add_reply("actor", "gen", reply, parts=parts if len(parts) > 1 else ())
        return rollouts

    async def scores(self) -> ScoredResponses:
        """A score for each response: of the reward processes, and where there is a reward model of both together.

        Nothing is scored that was scored before.
        """
        host = self.workers.reward_model
        if host is None or not self.asks_model:
            return await self._rule_scores()
        scored, of_model = await run_calls(
            self.config.run.schedule, self._rule_scores, lambda: self._model_scores(host)
        )
        combined: ScoredResponses = scored.with_model_scores(of_model, self.config.reward_model.coef_of)
        return combined

    async def by_parts(
        self,
        host: WorkerClient,
        name: str,
        send: Callable[[StreamPart], Awaitable[None]],
        compute: Compute,
        column: str,
    ) -> Batch:
        """A column that `host` computes, for each part as soon as its rows have been sent there.

        On the critic's group that is after its update of the step before; the rows are sent meanwhile.
        """
        columns = []
        async for part in self.rollouts.parts():
            await send(part)
            if host is self.workers.critic:
                async with self._preparing_critic:
                    await self.after_update()
            with self.record.timed(name):
                reply = await compute(part.slot, base_step=self._base_step)
                columns.append(await host.get_batch(part.slot, [column]))
            self.record.add_reply(host.role, name, reply)
        return self.rollouts.in_order(columns)

    async def _rule_scores(self) -> ScoredResponses:
        """The scorers: a score for each response, less what an overlong one loses."""
        reward, limit, known = self.config.reward, self.config.data.max_response_length, self.rollouts.scored
        scored: list[ScoredResponses] = []
        async for part in self.rollouts.parts():
            responses = known.by_rules() if known else await self._score(part, self.num_examine if not scored else 0)
            if self.is_learned_from:
                lengths = part.rollouts["responses"].lengths
                responses = responses.with_truncation(lengths, limit, self.config.rollout.stop)
                responses = responses.with_overlong_penalty(reward.overlong_buffer, lengths, limit)
            scored.append(responses)
        all_scored = ScoredResponses.join(scored).take(self.rollouts.order)
        if known is None:
            all_scored.check_failures(reward.max_error_rate, f"step {self.record.step}")
        return all_scored

    async def _score(self, part: StreamPart, num_examine: int) -> ScoredResponses:
        with self.record.timed("reward"), self.record.span("scoring", "score"):
            return await self.scorer.score(part.prompts, part.rollouts, num_examine=num_examine)

    async def _model_scores(self, host: WorkerClient) -> Float32s:
        """The reward model's host: a score for each response, which is encoded anew in the tokens of that model."""
        known = self.rollouts.scored
        if known is not None and (of_model := known.model_scores) is not None:
            return of_model
        longest, are_longest = self.scorer.max_reward_length, list[bool]()

        async def send(part: StreamPart) -> None:
            rows = await self.scorer.reward_rows(part.prompts, part.rollouts)
            are_longest.extend(length == longest for length in rows["reward_tokens"].lengths)
            await host.put_batch(part.slot, rows)

        name, compute = "reward_model", host.compute_reward_scores
        scores = await self.by_parts(host, name, send, compute, "rm_scores")
        if not self.is_baseline:
            self.record.metrics["reward/model_clip_ratio"] = sum(are_longest) / len(are_longest)
        return scores["rm_scores"].values
