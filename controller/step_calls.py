"""The calls of one step: which worker, which slot, which columns; each one timed and recorded."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from controller.data.prompts import PromptBatch
from controller.ppo.experience import Experience
from controller.rollout.log_prob_check import LogProbCheck
from controller.rollout.results import ScoredResponses
from controller.rollout.scoring import Scorer
from controller.rollout.stream import RolloutStream, StreamPart
from controller.schedule import run_calls
from controller.tracking.step_record import StepRecord
from controller.workers.actor_client import ActorClient, loss_terms
from controller.workers.client import WorkerClient
from controller.workers.command import CommandReply
from controller.workers.critic_client import CriticClient
from controller.workers.recovery import replay_if_clean
from controller.workers.worker_groups import Workers
from splitppo.batch import Batch
from splitppo.config import Config

AfterUpdate = Callable[[], Awaitable[None]]
Compute = Callable[..., Awaitable[CommandReply]]


@dataclass(eq=False)
class StepCalls:
    """One step's calls, in the order of the dataflow.

    Those that need rollouts wait for them, so that all can be started together: what other groups compute for each part
    of them, what the generating actor computes for all together. Every call answers in the order of the prompts.
    `config` is what holds in this step.
    """

    config: Config
    workers: Workers
    scorer: Scorer
    log_prob_check: LogProbCheck
    prompts: PromptBatch
    record: StepRecord

    def __post_init__(self) -> None:
        self._actor, self._critic = self.workers.actor, self.workers.critic
        self._stream = RolloutStream(self.config, self._actor, self.prompts, self.record.step)
        self._slot, self._base_step = self._stream.slot, self.record.step - 1
        self._no_columns = Batch(self.prompts.num_prompts * self.config.rollout.n, {})
        self._has_generated = asyncio.Event()
        self._sent_to_critic: set[int] = set()  # parts of the slot
        self._preparing_critic = asyncio.Lock()
        # The actor's columns go first: the critic's are sent while it works.
        self._sending_updates = asyncio.Lock()

    async def generate(self) -> Batch:
        """Actor: prompts and responses, n per prompt, ordered by prompt, then sample."""
        with self.record.timed("gen"):
            rollouts, reply = await self._stream.generate(on_generated=self._has_generated.set)
        parts = [places.tolist() for places in self._stream.places]
        self.record.add_reply("actor", "gen", reply, parts=parts if len(parts) > 1 else ())
        return rollouts

    async def old_log_probs(self) -> Batch:
        """Actor: log-probs of the responses under policy and rollout backend; no column where none is needed.

        With bypass_mode the policy's are computed where they are checked, and nowhere else.
        """
        computes = self.config.needs_old_log_probs or self.log_prob_check.is_due(self.record.step)
        if not (computes or self.config.algorithm.rollout_correction.bypasses):
            return self._no_columns
        await self._has_generated.wait()
        if not computes:
            return await self._actor.get_batch(self._slot, ["rollout_log_probs"])
        with self.record.timed("old_log_prob"):
            reply = await self._actor.compute_log_probs(self._slot, base_step=self._base_step)
        self.record.add_reply("actor", "old_log_prob", reply)
        return await self._actor.get_batch(self._slot, ["old_log_probs", "rollout_log_probs"])

    async def ref_log_probs(self, *, after_update: AfterUpdate) -> Batch:
        """The reference's host: log-probs of the responses under the reference; no column where KL is not used.

        `after_update` as in `values`, where the critic hosts the reference.
        """
        host = self.workers.reference
        if host is None or not self.config.uses_reference:  # in this step
            return self._no_columns
        if host is not self._actor:
            send = partial(self._send_rollouts, host)
            return await self._by_parts(host, "ref", send, host.compute_ref_log_probs, "ref_log_probs", after_update)
        await self._has_generated.wait()
        with self.record.timed("ref"):
            reply = await host.compute_ref_log_probs(self._slot, base_step=self._base_step)
        self.record.add_reply(host.role, "ref", reply)
        return await host.get_batch(self._slot, ["ref_log_probs"])

    async def values(self, *, after_update: AfterUpdate) -> Batch:
        """Critic: values of the states before each response token; no column without a critic.

        Values are computed after `after_update`, which waits for the critic's update of the step before; the rows are
        sent meanwhile.
        """
        critic = self._critic
        if critic is None:
            return self._no_columns
        send = partial(self._send_rollouts, critic)
        return await self._by_parts(critic, "values", send, critic.compute_values, "values", after_update)

    async def _by_parts(
        self,
        host: WorkerClient,
        name: str,
        send: Callable[[StreamPart], Awaitable[None]],
        compute: Compute,
        column: str,
        after_update: AfterUpdate,
    ) -> Batch:
        """A column that `host` computes, for each part as soon as its rows have been sent there."""
        columns = []
        async for part in self._stream.parts():
            await send(part)
            if host is self._critic:
                async with self._preparing_critic:
                    await after_update()
            with self.record.timed(name):
                reply = await compute(part.slot, base_step=self._base_step)
                columns.append(await host.get_batch(part.slot, [column]))
            self.record.add_reply(host.role, name, reply)
        return self._stream.in_order(columns)

    async def _send_rollouts(self, host: WorkerClient, part: StreamPart) -> None:
        """Prompts and responses to the critic's group, once: values and the reference's log-probs need the same."""
        async with self._preparing_critic:
            if part.slot.part not in self._sent_to_critic:
                await host.put_batch(part.slot, part.rollouts)
                self._sent_to_critic.add(part.slot.part)

    async def scores(self, *, after_update: AfterUpdate) -> ScoredResponses:
        """A score for each response: of the reward processes, and where there is a reward model of both together.

        `after_update` as in `values`, where the critic hosts the reward model.
        """
        host, coef_of = self.workers.reward_model, self.config.reward_model.coef_of
        if host is None:
            self.record.scored = await self._rule_scores()
            return self.record.scored
        scored, of_model = await run_calls(
            self.config.run.schedule, self._rule_scores, lambda: self._model_scores(host, after_update)
        )
        scores = of_model["rm_scores"].values
        self.record.scored = scored.with_model_scores(scores, coef_of)
        return self.record.scored

    async def _model_scores(self, host: WorkerClient, after_update: AfterUpdate) -> Batch:
        """The reward model's host: a score for each response, which is encoded anew in the tokens of that model."""
        longest, are_longest = self.scorer.max_reward_length, list[bool]()

        async def send(part: StreamPart) -> None:
            rows = await self.scorer.reward_rows(part.prompts, part.rollouts)
            are_longest.extend(length == longest for length in rows["reward_tokens"].lengths)
            await host.put_batch(part.slot, rows)

        name, compute = "reward_model", host.compute_reward_scores
        scores = await self._by_parts(host, name, send, compute, "rm_scores", after_update)
        self.record.metrics["reward/model_clip_ratio"] = sum(are_longest) / len(are_longest)
        return scores

    async def _rule_scores(self) -> ScoredResponses:
        """The scorers: a score for each response, less what an overlong one loses."""
        reward, limit = self.config.reward, self.config.data.max_response_length
        scored: list[ScoredResponses] = []
        async for part in self._stream.parts():
            num_examine = 0 if scored else reward.num_examine
            with self.record.timed("reward"), self.record.span("scoring", "score"):
                responses = await self.scorer.score(part.prompts, part.rollouts, num_examine=num_examine)
            lengths = part.rollouts["responses"].lengths
            responses = responses.with_truncation(lengths, limit, self.config.rollout.stop)
            scored.append(responses.with_overlong_penalty(reward.overlong_buffer, lengths, limit))
        all_scored = ScoredResponses.join(scored).take(self._stream.order)
        all_scored.check_failures(reward.max_error_rate, f"step {self.record.step}")
        return all_scored

    async def update_actor(self, experience: Experience) -> None:
        """Actor: one PPO update of the policy; in the critic's warm-up only the step advances."""
        warming_up = self._critic is not None and self.record.step <= self.config.critic.warmup_steps
        lacks_reference = self.config.actor.use_kl_loss and self.workers.reference is not self._actor
        lacks_old = self.config.algorithm.rollout_correction.bypasses
        columns = None if warming_up else experience.actor_columns(lacks_reference=lacks_reference, lacks_old=lacks_old)
        update = partial(self._actor.update, terms=loss_terms(self.config), advance_only=warming_up)
        await self._update(self._actor, update, columns)

    async def update_critic(self, experience: Experience) -> None:
        """Critic: one update of the value model, if there is one."""
        if self._critic is not None:
            await self._update(self._critic, self._critic.update, experience.critic_columns)

    async def _update(
        self, client: ActorClient | CriticClient, update: Callable[..., Awaitable[CommandReply]], columns: Batch | None
    ) -> None:
        """Sends the columns and updates; both again where the update has failed without touching the weights."""

        async def attempt() -> CommandReply:
            if columns is not None:
                async with self._sending_updates:
                    await client.put_batch(self._slot, columns)
            return await update(self._slot, base_step=self._base_step)

        name = f"update_{client.role}"
        with self.record.timed(name):
            reply = await replay_if_clean(client, self._base_step, attempt)
        self.record.add_reply(client.role, name, reply)
