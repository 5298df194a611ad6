"""The calls of one step: which worker, which slot, which columns; each one timed and recorded."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from controller.ppo.experience import Experience
from controller.ppo.masked_stats import Float32s
from controller.rollout.log_prob_check import LogProbCheck
from controller.rollout.results import ScoredResponses
from controller.rollout.scoring import Scorer
from controller.rollout.stream import Rollouts, RolloutStream, StreamPart
from controller.rollout_calls import AfterUpdate, RolloutCalls
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
from splitppo.config.policy_loss import COVARIANCE_LOSSES


@dataclass(eq=False)
class StepCalls:
    """One step's calls, in the order of the dataflow.

    Those that need rollouts wait for them, so that all can be started together: what other groups compute for each part
    of them, what the generating actor computes for all together. Every call answers in the order of the prompts. The
    critic's group computes nothing before `after_update`, which waits for the critic's update of the step before.
    `config` is what holds in this step.
    """

    config: Config
    workers: Workers
    scorer: Scorer
    log_prob_check: LogProbCheck
    rollouts: Rollouts
    record: StepRecord
    after_update: AfterUpdate

    def __post_init__(self) -> None:
        self._actor, self._critic = self.workers.actor, self.workers.critic
        self._slot, self._base_step = self.rollouts.slot, self.record.step - 1
        self._no_columns = Batch(self.rollouts.prompts.num_prompts * self.config.rollout.n, {})
        self._calls = RolloutCalls(
            self.config,
            self.workers,
            self.scorer,
            self.record,
            self.rollouts,
            self.after_update,
            is_learned_from=True,
            num_examine=self.config.reward.num_examine,
        )
        self._has_sampled = asyncio.Event()
        # Greedy rollouts go before what else the actor computes: they are scored while it does.
        needs_greedy = self.config.algorithm.needs_greedy_scores
        self._has_generated = asyncio.Event() if needs_greedy else self._has_sampled
        self._sent_to_critic: set[int] = set()  # parts of the slot
        self._sending_to_critic = asyncio.Lock()
        # The actor's columns go first: the critic's are sent while it works.
        self._sending_updates = asyncio.Lock()

    async def generate(self) -> Batch:
        """Actor: prompts and responses, n per prompt, ordered by prompt, then sample."""
        return await self._calls.generate(self._has_sampled.set)

    async def greedy_scores(self) -> Float32s | None:
        """Actor and scorers: the score of a greedy rollout of each prompt, whatever its length.

        None where the estimator needs none.
        """
        if not self.config.algorithm.needs_greedy_scores:
            return None
        greedy = RolloutStream.greedy(self.config, self._actor, self.rollouts.prompts, self.record.step)
        services = (self.config, self.workers, self.scorer, self.record)
        calls = RolloutCalls(*services, greedy, self.after_update, is_baseline=True)
        await self._has_sampled.wait()
        generate = partial(calls.generate, self._has_generated.set)
        _, scored = await run_calls(self.config.run.schedule, generate, calls.scores)
        scores: Float32s = scored.scores
        self.record.metrics["critic/greedy_score/mean"] = float(scores.mean())
        return scores

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

    async def ref_log_probs(self) -> Batch:
        """The reference's host: log-probs of the responses under the reference; no column where KL is not used."""
        host = self.workers.reference
        if host is None or not self.config.uses_reference:  # in this step
            return self._no_columns
        if host is not self._actor:
            send, compute = partial(self._send_rollouts, host), host.compute_ref_log_probs
            return await self._calls.by_parts(host, "ref", send, compute, "ref_log_probs")
        await self._has_generated.wait()
        with self.record.timed("ref"):
            reply = await host.compute_ref_log_probs(self._slot, base_step=self._base_step)
        self.record.add_reply(host.role, "ref", reply)
        return await host.get_batch(self._slot, ["ref_log_probs"])

    async def values(self) -> Batch:
        """Critic: values of the states before each response token; no column without a critic."""
        critic = self._critic
        if critic is None:
            return self._no_columns
        send = partial(self._send_rollouts, critic)
        return await self._calls.by_parts(critic, "values", send, critic.compute_values, "values")

    async def _send_rollouts(self, host: WorkerClient, part: StreamPart) -> None:
        """Prompts and responses to the critic's group, once: values and the reference's log-probs need the same."""
        async with self._sending_to_critic:
            if part.slot.part not in self._sent_to_critic:
                await host.put_batch(part.slot, part.rollouts)
                self._sent_to_critic.add(part.slot.part)

    async def scores(self) -> ScoredResponses:
        """A score for each response, less what an overlong one loses; see `RolloutCalls.scores`."""
        self.record.scored = await self._calls.scores()
        return self.record.scored

    async def update_actor(self, experience: Experience) -> None:
        """Actor: one PPO update of the policy; in the critic's warm-up only the step advances."""
        warming_up = self._critic is not None and self.record.step <= self.config.critic.warmup_steps
        lacks_reference = self.config.actor.use_kl_loss and self.workers.reference is not self._actor
        lacks_old = self.config.algorithm.rollout_correction.bypasses
        draws_tokens = self.config.actor.policy_loss.loss_mode in COVARIANCE_LOSSES
        columns = None
        if not warming_up:
            columns = experience.actor_columns(
                lacks_reference=lacks_reference, lacks_old=lacks_old, draws_tokens=draws_tokens
            )
        update = partial(self._actor.update, terms=loss_terms(self.config), advance_only=warming_up)
        # Passes over every token, which nobody has to wait for while the engines work.
        measuring = asyncio.get_running_loop().run_in_executor(None, lambda: self.record.learning)
        await self._update(self._actor, update, columns)
        await measuring

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
