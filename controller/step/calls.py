"""The calls of one step: which worker, which slot, which columns; each call is timed and recorded."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from controller.ppo.experience import Experience
from controller.ppo.masked_stats import Float32s
from controller.ppo.scores import Scores
from controller.schedule import run_calls
from controller.step.context import StepContext
from controller.step.generation import SampledRollouts
from controller.step.parts import Compute, PartCalls, PendingRollouts, RolloutPart
from controller.workers.actor_client import ActorClient, loss_terms
from controller.workers.client import WorkerClient
from controller.workers.command import CommandReply
from controller.workers.critic_client import CriticClient
from controller.workers.recovery import replay_if_clean
from splitppo.batch import Batch


class StepCalls:
    """The calls of one step, in the order of the dataflow.

    All of them can be started together: a call that needs rollouts waits for them. Other groups compute for each part
    of the rollouts, the actor, which generates them, for all together. Every call answers in the order of the prompts.

    Only `generate` streams rows. The events that every command streams over the wire are progress and its result.
    """

    def __init__(self, step: StepContext, rollouts: PendingRollouts) -> None:
        self.step, self.rollouts = step, rollouts
        self._config, self._record = step.config, step.record
        self._actor, self._critic = step.workers.actor, step.workers.critic
        self._no_columns = Batch(rollouts.prompts.num_prompts * step.config.rollout.n, {})
        num_examine = step.config.reward.num_examine
        self._part_calls = PartCalls(step, rollouts, is_learned_from=True, num_examine=num_examine)
        # The actor samples the greedy rollouts before it computes anything else: they are scored while it computes.
        needs_greedy = step.config.algorithm.needs_greedy_scores
        self._greedy = SampledRollouts.greedy(step, rollouts.prompts) if needs_greedy else None
        self._sampled_last: PendingRollouts = self._greedy or rollouts
        self._critic_rows = RowsSentOnce()
        self._actor_has_columns = asyncio.Event()  # the critic's are sent afterwards, while the actor works

    async def generate(self) -> Batch:
        """Actor: prompts and responses, n per prompt, ordered by prompt, then sample."""
        return await self.rollouts.generate()

    async def greedy_scores(self) -> Float32s | None:
        """Actor and scorers: the score of a greedy rollout of each prompt, whatever its length.

        Returns None if the estimator needs none.
        """
        if self._greedy is None:
            return None
        await self.rollouts.on_actor.wait()
        calls = PartCalls(self.step, self._greedy, is_baseline=True)
        _, greedy = await run_calls(self._config.run.schedule, self._greedy.generate, calls.scores)
        scores: Float32s = greedy.scores
        self._record.metrics["critic/greedy_score/mean"] = float(scores.mean())
        return scores

    async def old_log_probs(self) -> Batch:
        """Actor: log-probs of the responses under policy and rollout backend; no column if none is needed.

        With `bypass_mode` the policy's are computed only in steps that check them.
        """
        columns = ["old_log_probs", "rollout_log_probs"]
        if self._config.needs_old_log_probs or self.step.log_prob_check.is_due(self.step.number):
            return await self._compute_on_actor("old_log_prob", self._actor.compute_log_probs, columns)
        if not self._config.algorithm.rollout_correction.bypasses:
            return self._no_columns
        await self._sampled_last.on_actor.wait()
        return await self._actor.get_batch(self.rollouts.slot, ["rollout_log_probs"])

    async def ref_log_probs(self) -> Batch:
        """The reference's host: log-probs of the responses under the reference; no column if KL is not used.

        services/roles/frozen_models.py holds the models that are not trained, a reference or a reward model.
        """
        host = self.step.workers.reference
        if host is None or not self._config.uses_reference:  # in this step
            return self._no_columns
        if host is self._actor:
            return await self._compute_on_actor("ref", host.compute_ref_log_probs, ["ref_log_probs"])
        return await self._compute_on_critic(host, "ref", host.compute_ref_log_probs, "ref_log_probs")

    async def values(self) -> Batch:
        """Critic: values of the states before each response token; no column without a critic."""
        if self._critic is None:
            return self._no_columns
        return await self._compute_on_critic(self._critic, "values", self._critic.compute_values, "values")

    async def scores(self) -> Scores:
        """Returns a score for each response, less what an overlong one loses; see `PartCalls.scores`."""
        self._record.scores = await self._part_calls.scores()
        return self._record.scores

    async def update_actor(self, experience: Experience) -> None:
        """Actor: one PPO update of the policy; in the critic's warm-up only the step advances."""
        config = self._config
        is_warm_up = self._critic is not None and self.step.number <= config.critic.warmup_steps

        async def send() -> None:
            if not is_warm_up:
                columns = experience.actor_columns(
                    lacks_reference=config.actor.use_kl_loss and self.step.workers.reference is not self._actor,
                    lacks_old=config.algorithm.rollout_correction.bypasses,
                )
                await self._actor.put_batch(self.rollouts.slot, columns)
            self._actor_has_columns.set()

        # Passes over every token, which nobody has to wait for while the engines work.
        measuring = asyncio.get_running_loop().run_in_executor(None, lambda: self._record.learning)
        await self._update(
            self._actor, send, partial(self._actor.update, terms=loss_terms(config), advance_only=is_warm_up)
        )
        await measuring

    async def update_critic(self, experience: Experience) -> None:
        """Critic: one update of the value model, if there is one; its columns are sent while the actor works."""
        critic = self._critic
        if critic is None:
            return

        async def send() -> None:
            await self._actor_has_columns.wait()
            await critic.put_batch(self.rollouts.slot, experience.critic_columns)

        await self._update(critic, send, critic.update)

    async def _update(
        self, client: ActorClient | CriticClient, send: Callable[[], Awaitable[None]], update: Compute
    ) -> None:
        """Sends the columns and updates; both again if the update has failed without touching the weights.

        If the group is lost instead, the error ends `Trainer.fit`, and `Session._train_recovering`
        (controller/session.py) restores both models to their last common checkpoint.
        """

        async def attempt() -> CommandReply:
            await send()
            return await update(self.rollouts.slot, base_step=self.step.base_step)

        name = f"update_{client.role}"
        with self._record.timed(name):
            reply = await replay_if_clean(client, self.step.base_step, attempt)
        self._record.add_reply(client.role, name, reply)

    async def _compute_on_actor(self, name: str, compute: Compute, columns: Sequence[str]) -> Batch:
        """Returns columns that the actor computes for all responses together, once it has sampled everything."""
        await self._sampled_last.on_actor.wait()
        with self._record.timed(name):
            reply = await compute(self.rollouts.slot, base_step=self.step.base_step)
        self._record.add_reply("actor", name, reply)
        return await self._actor.get_batch(self.rollouts.slot, columns)

    async def _compute_on_critic(self, host: WorkerClient, name: str, compute: Compute, column: str) -> Batch:
        """Returns a column that the critic's group computes from prompts and responses, part by part."""
        send = partial(self._critic_rows.send, host)
        return await self._part_calls.compute_column(host, name, send, compute, column)


class RowsSentOnce:
    """Sends each part to a group once: values and the reference's log-probs are computed from the same rows there."""

    def __init__(self) -> None:
        self._sent: set[int] = set()
        self._sending = asyncio.Lock()

    async def send(self, host: WorkerClient, part: RolloutPart) -> None:
        """Sends prompts and responses of a part, or waits until another call has sent them."""
        async with self._sending:
            if part.slot.part not in self._sent:
                await host.put_batch(part.slot, part.rollouts)
                self._sent.add(part.slot.part)
