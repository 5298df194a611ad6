"""Makes the calls that collect the experience of one PPO step: each asks a worker group for columns of a slot."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from controller.data.privileged_prompts import PRIVILEGED
from controller.ppo.distillation import teachers_of_rows
from controller.ppo.masked_stats import Float32s
from controller.ppo.scores import Scores
from controller.sampling.stream import in_order
from controller.schedule import run_calls
from controller.step.context import StepContext
from controller.step.parts import Compute, PartCalls, PendingRollouts, RowsSentOnce
from controller.step.rollouts import SampledRollouts
from controller.workers.clients import WorkerClient
from splitppo.batch import Batch


class StepCalls:
    """The calls of one PPO step to the worker groups, in the order of the dataflow. `rollouts.generate` is the first.

    All calls can be started together: a call that needs rollouts waits for them. The actor generates the rollouts, and
    computes for all of them together; the other groups compute for each part that has arrived. Every call returns its
    rows in the order of the prompts.

    Only `generate` streams rows. The events of a command on the wire are its progress and its result.
    """

    def __init__(self, step: StepContext, rollouts: PendingRollouts) -> None:
        self.step = step
        self.rollouts = rollouts
        self._config = step.config
        self._actor = step.workers.actor
        self._no_columns = Batch(rollouts.prompts.num_prompts * step.config.rollout.n, {})
        num_examine = step.config.reward.num_examine
        self._part_calls = PartCalls(step, rollouts, is_learned_from=True, num_examine=num_examine)
        # The actor samples the greedy rollouts first, so that they are scored while it computes.
        needs_greedy = step.config.algorithm.needs_greedy_scores and rollouts.greedy_scores is None
        self._greedy = SampledRollouts.greedy(step, rollouts.prompts) if needs_greedy else None
        self._sampled_last: PendingRollouts = self._greedy or rollouts
        self._sent_rows: defaultdict[str, RowsSentOnce] = defaultdict(RowsSentOnce)  # by role
        # No other group gets what the value model alone reads.
        self._sent_rows["critic"] = RowsSentOnce(step.privileged)

    async def greedy_scores(self) -> Float32s | None:
        """Samples and scores a greedy response to each prompt; returns the scores, [P], without any penalty for length.

        The actor samples the responses. Returns None if the estimator needs no such scores.
        """
        if self._greedy is None:
            return self.rollouts.greedy_scores
        await self.rollouts.on_actor.wait()
        return await PartCalls(self.step, self._greedy, is_baseline=True).greedy_scores()

    async def old_log_probs(self) -> Batch:
        """Returns the responses' log-probs under policy and rollout backend: the columns that the algorithm needs.

        With `bypass_mode` the policy's log-probs are computed only in steps that check them. Where nobody needs them,
        the rollout backend's alone are fetched, for `bypass_mode` and for teachers; else no column.
        """
        columns = ["old_log_probs", "rollout_log_probs"]
        if self._config.needs_old_log_probs or self.step.log_prob_check.is_due(self.step.number):
            return await self._compute_on_actor("old_log_prob", self._actor.compute_log_probs, columns)
        if not self._config.algorithm.rollout_correction.bypasses and self.step.workers.teacher is None:
            return self._no_columns
        await self._sampled_last.on_actor.wait()
        return await self._actor.get_batch(self.rollouts.slot, ["rollout_log_probs"])

    async def frozen_log_probs(self) -> Batch:
        """Computes the responses' log-probs under reference and teachers, as far as the run has them."""
        schedule = self._config.run.schedule
        ref, taught = await run_calls(schedule, self.ref_log_probs, self.teacher_log_probs)
        merged: Batch = ref.merge(taught)
        return merged

    async def ref_log_probs(self) -> Batch:
        """Computes the responses' log-probs under the reference model; returns no column if KL is not used.

        services/roles/frozen_models.py has the models that are not trained.
        """
        host = self.step.workers.reference
        if host is None or not self._config.uses_reference:  # in this step
            return self._no_columns
        return await self._compute_frozen(host, "ref", host.compute_ref_log_probs, ["ref_log_probs"])

    async def teacher_log_probs(self) -> Batch:
        """Computes the responses' log-probs under their teachers; returns no column if there is no teacher.

        If the actor's loss has the signal, all columns of the teachers are sent to the actor.
        controller/ppo/distillation.py says what becomes of them.
        """
        host = self.step.workers.teacher
        if host is None:
            return self._no_columns
        teacher = self._config.teacher
        is_on_actor = host is self._actor
        if is_on_actor:
            await self._put_teachers_of_rows()
        compute = partial(host.compute_teacher_log_probs, num_ids=self.step.scorer.tokenizer.vocab_size)
        fetched = ["teacher_log_probs"] if is_on_actor else teacher.columns
        columns = await self._compute_frozen(host, "teacher", compute, fetched)
        if teacher.is_in_loss and not is_on_actor:
            await self._sampled_last.on_actor.wait()
            await self._actor.put_batch(self.rollouts.slot, columns)
        return columns.select(["teacher_log_probs"])

    async def values(self) -> Batch:
        """Makes the critic compute the values of the states before each response token; no column without a critic."""
        critic = self.step.workers.critic
        if critic is None:
            return self._no_columns
        values = await self._compute_in_parts(critic, "values", critic.compute_values, ["values"])
        self._record_privileged()
        return values

    def _record_privileged(self) -> None:
        """Notes for the record what the value model alone has read before each response, if it has read anything."""
        sent = self._sent_rows["critic"].privileged_columns
        if sent:
            parts = self.rollouts.parts.items
            columns = in_order([sent[part.slot.part] for part in parts], parts)
            self.step.record.privileged = columns[PRIVILEGED]

    async def scores(self) -> Scores:
        """Scores each response, with the penalty of overlong responses; see `PartCalls.scores`."""
        scores = await self._part_calls.scores()
        self.step.record.scores = scores
        return scores

    async def _put_teachers_of_rows(self) -> None:
        """Tells the actor's group the teacher of each row, if there are several and it hosts them."""
        await self._sampled_last.on_actor.wait()
        sources = [row.data_source for row in self.rollouts.prompts.rows for _ in range(self._config.rollout.n)]
        numbers = teachers_of_rows(self._config.teacher, sources)
        if numbers.columns:
            await self._actor.put_batch(self.rollouts.slot, numbers)

    async def _compute_frozen(self, host: WorkerClient, name: str, compute: Compute, columns: Sequence[str]) -> Batch:
        """Makes the group that hosts a frozen model compute columns for all responses; returns the columns."""
        if host is self._actor:
            return await self._compute_on_actor(name, compute, columns)
        return await self._compute_in_parts(host, name, compute, columns)

    async def _compute_on_actor(self, name: str, compute: Compute, columns: Sequence[str]) -> Batch:
        """Makes the actor compute columns for all responses together, once all are sampled; returns the columns."""
        await self._sampled_last.on_actor.wait()
        with self.step.record.timed(name):
            reply = await compute(self.rollouts.slot, base_step=self.step.base_step)
        self.step.record.add_reply("actor", name, reply)
        return await self._actor.get_batch(self.rollouts.slot, columns)

    async def _compute_in_parts(self, host: WorkerClient, name: str, compute: Compute, columns: Sequence[str]) -> Batch:
        """Makes a group compute columns from prompts and responses, one part after another; returns the columns."""
        send = partial(self._sent_rows[host.role].send, host, self._config.teacher)
        return await self._part_calls.compute_columns(host, name, send, compute, columns)
