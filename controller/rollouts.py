"""What the actor makes before its update: the rollouts of a step, streamed in groups, and their log-probs."""

from __future__ import annotations

from collections.abc import Sequence

from controller.clients import ActorClient
from controller.data import PromptBatch
from controller.rollout_check import RolloutCheck
from controller.rollout_groups import RolloutGroup, whole_slot
from controller.schedule import gather_calls, run_calls
from controller.step_record import StepRecord
from splitppo.batch import Batch, concatenate
from splitppo.config import Config
from splitppo.v1.actor_pb2 import POLICY_MODEL_POLICY, POLICY_MODEL_REFERENCE, PolicyModel, SamplingParams


class RolloutMaker:
    """Lets the actor generate, and compute the log-probs that the step needs."""

    def __init__(self, config: Config, actor: ActorClient, check: RolloutCheck) -> None:
        self._config = config
        self._actor = actor
        self._check = check

    async def generate(self, prompts: PromptBatch, groups: Sequence[RolloutGroup], record: StepRecord) -> Batch:
        """Samples n responses per prompt; returns prompts and responses, ordered by prompt, then sample.

        The rollouts of each group are there before, as soon as its last response has ended.
        """
        rollout = self._config.rollout
        sampling = SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_response_length=self._config.data.max_response_length,
        )
        with record.timed("gen"):
            rows = prompts.to_batch(self._config.run.seed, record.step, rollout.n)
            await self._actor.put_batch(whole_slot(record.step), rows)
            _, *rollouts = await gather_calls(
                self._sample(sampling, groups, record), *[self._fetch(group) for group in groups]
            )
        return concatenate(rollouts)

    async def _sample(self, sampling: SamplingParams, groups: Sequence[RolloutGroup], record: StepRecord) -> None:
        reply = await self._actor.generate(
            whole_slot(record.step),
            sampling,
            base_step=record.step - 1,
            num_parts=len(groups),
            on_part=lambda part: groups[part - 1].ended.set(),
        )
        record.add_reply("actor", "gen", reply)
        for group in groups:
            group.ended.set()

    async def _fetch(self, group: RolloutGroup) -> Batch:
        await group.ended.wait()
        responses = await self._actor.get_batch(group.slot, ["responses"])
        rollouts = group.prompts.repeated(self._config.rollout.n).merge(responses)
        group.arrive(rollouts)
        return rollouts

    async def compute_log_probs(self, rollouts: Batch, record: StepRecord) -> Batch:
        """Log-probs of the responses under the policy, and under the reference where KL is used.

        Where the policy's are computed, the rollout engine's come with them, for comparison.
        """
        slot, schedule = whole_slot(record.step), self._config.run.schedule
        wanted: list[tuple[PolicyModel, str, str]] = []
        if self._needs_old_log_probs(record.step):
            wanted.append((POLICY_MODEL_POLICY, "old_log_prob", "old_log_probs"))
        if self._config.uses_reference:
            wanted.append((POLICY_MODEL_REFERENCE, "ref", "ref_log_probs"))

        async def compute(model: PolicyModel, name: str) -> None:
            with record.timed(name):
                reply = await self._actor.compute_log_probs(slot, model, base_step=record.step - 1)
            record.add_reply("actor", name, reply)

        await run_calls(schedule, *[lambda m=model, n=name: compute(m, n) for model, name, _ in wanted])
        if not wanted:
            return Batch(rollouts.num_rows, {})
        columns = [column for _, _, column in wanted]
        if "old_log_probs" in columns:
            columns.append("rollout_log_probs")
        return await self._actor.get_batch(slot, columns)

    def _needs_old_log_probs(self, step: int) -> bool:
        """One mini-batch and one epoch are on-policy: the update's own log-probs are the old ones.

        Then only the KL in the reward, rollout correction and the check of the rollout engine ask for them.
        """
        actor, algorithm = self._config.actor, self._config.algorithm
        one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == self._config.data.train_batch_size
        return (
            not one_update
            or algorithm.use_kl_in_reward
            or algorithm.rollout_correction.is_active
            or self._check.is_due(step)
        )
