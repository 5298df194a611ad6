"""Checks a version of the policy in the rollout group: a few sampled tokens must have the actor's log-probs."""

import numpy as np

from controller.data.prompts import PromptBatch
from controller.step.context import StepContext
from controller.workers.clients import sampling_params
from controller.workers.command import CommandReply
from splitppo.batch import Batch
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_EVALUATION, Slot

_NUM_PROMPTS = 8
_NUM_TOKENS = 32
_PART = 1 << 20  # no validation has so many parts


class Probe:
    """A few short responses of the rollout group, whose log-probs are compared with those of the actor.

    Both groups have the weights of `step.base_step`. In training with `rollout.staleness` 1 no other log-probs of
    rollout group and actor are of the same weights.
    """

    def __init__(self, step: StepContext, prompts: PromptBatch) -> None:
        config = step.config
        rollout = step.workers.sampler.rollout
        assert rollout is not None, "the actor needs no probe"
        self._step = step
        self._client = rollout
        self._slot = Slot(kind=SLOT_KIND_EVALUATION, step=step.base_step, part=_PART)
        asked = prompts.take(np.arange(min(_NUM_PROMPTS, prompts.num_prompts)))
        self._seeded = asked.to_batch(config.run.seed, step.number, 1)
        self._sampling: SamplingParams = sampling_params(config.rollout, config.data)
        self._sampling.max_response_length = min(_NUM_TOKENS, self._sampling.max_response_length)

    async def sample(self) -> Batch:
        """Samples the responses to the first of the prompts; returns prompts, responses and rollout_log_probs."""
        step = self._step
        sampler = step.workers.sampler
        reply, rows = await sampler.sample(self._client, step.base_step, step.record.add_reply, self._attempt)
        step.record.add_reply("rollout", "probe", reply)
        return self._seeded.select(("prompts",)).merge(rows)

    async def _attempt(self) -> tuple[CommandReply, Batch]:
        client = self._client
        await client.put_batch(self._slot, self._seeded)
        reply = await client.generate(self._slot, self._sampling, base_step=self._step.base_step)
        return reply, await client.get_batch(self._slot, ["responses", "rollout_log_probs"])

    async def compare(self, rows: Batch) -> None:
        """Compares the log-probs of the sampled rows with the actor's; the step gets metrics training/probe_....

        Raises:
            RolloutMismatch: the differences are over `rollout.max_log_prob_diff` or `rollout.max_mean_log_prob_diff`.
        """
        step = self._step
        actor = self._step.workers.actor
        await actor.put_batch(self._slot, rows)
        step.record.add_reply("actor", "probe", await actor.compute_log_probs(self._slot, base_step=step.base_step))
        computed = await actor.get_batch(self._slot, ["old_log_probs"])
        differences = np.abs(computed["old_log_probs"].values - rows["rollout_log_probs"].values)
        largest = float(differences.max())
        mean = float(differences.mean())
        step.record.metrics["training/probe_log_probs_diff_max"] = largest
        step.record.metrics["training/probe_log_probs_diff_mean"] = mean
        step.log_prob_check.compare(f"the weights of step {step.base_step} in the rollout group", largest, mean)
