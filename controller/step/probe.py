"""Checks a version of the policy in the rollout group: a few sampled tokens must have the actor's log-probs."""

from dataclasses import replace

import numpy as np

from controller.data.prompts import PromptBatch
from controller.sampling.stream import Asked, sample
from controller.step.context import StepContext
from controller.workers.clients import sampling_params
from splitppo.batch import Batch
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
        """Prepares the first few prompts, whose responses have `_NUM_TOKENS` tokens at most; one sample of each."""
        assert step.sampling.rollout is not None, "the actor needs no probe"
        config = step.config
        self._step = step
        self._slot = Slot(kind=SLOT_KIND_EVALUATION, step=step.base_step, part=_PART)
        params = sampling_params(config.rollout, config.data)
        room = config.longest_context - config.data.max_prompt_length
        params.max_response_length = min(_NUM_TOKENS, params.max_response_length, room)
        some = prompts.take(np.arange(min(_NUM_PROMPTS, prompts.num_prompts)))
        self._asked = Asked(
            prompts=some,
            seeded=some.to_batch(config.run.seed, step.number, 1),
            version=step.base_step,
            params=params,
            slot=self._slot,
            columns=("responses", "rollout_log_probs"),
            work="probe",
        )

    async def sample(self) -> Batch:
        """Samples the responses to the first of the prompts; returns prompts, responses and rollout_log_probs."""
        step = self._step
        rollout_group = replace(step.sampling, share=1.0)
        [part] = [part async for part in sample(rollout_group, self._asked, step.record)]
        return part.rollouts

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
