"""Checks a version of the policy in the rollout group: a few sampled tokens must have the actor's log-probs."""

import numpy as np

from controller.data.prompts import PromptBatch
from controller.step.context import StepContext
from controller.workers.command import CommandReply
from controller.workers.sampler_client import sampling_params
from splitppo.batch import Batch
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_EVALUATION, Slot

_NUM_PROMPTS = 8
_NUM_TOKENS = 32
_PART = 1 << 20  # no validation has so many parts


async def probe(step: StepContext, prompts: PromptBatch) -> None:
    """Samples short responses to the first prompts, and compares their log-probs with those of the actor.

    Both groups have the weights of `step.base_step`. In training with `rollout.staleness` 1 no other log-probs of
    rollout group and actor are of the same weights. The differences are metrics of the step, training/probe_....

    Raises:
        RolloutMismatch: the largest difference is over `rollout.max_log_prob_diff`.
    """
    config, sampler, version = step.config, step.workers.sampler, step.base_step
    slot = Slot(kind=SLOT_KIND_EVALUATION, step=version, part=_PART)
    asked = prompts.take(np.arange(min(_NUM_PROMPTS, prompts.num_prompts)))
    sampling: SamplingParams = sampling_params(config.rollout, config.data)
    sampling.max_response_length = min(_NUM_TOKENS, sampling.max_response_length)

    seeded = asked.to_batch(config.run.seed, step.number, 1)

    async def attempt() -> tuple[CommandReply, Batch]:
        await sampler.client.put_batch(slot, seeded)
        reply = await sampler.client.generate(slot, sampling, base_step=version)
        return reply, await sampler.client.get_batch(slot, ["responses", "rollout_log_probs"])

    reply, rows = await sampler.sample(version, step.record.add_reply, attempt)
    step.record.add_reply(sampler.client.role, "probe", reply)
    actor = step.workers.actor
    await actor.put_batch(slot, rows.merge(seeded.select(("prompts",))))
    step.record.add_reply("actor", "probe", await actor.compute_log_probs(slot, base_step=version))
    computed = await actor.get_batch(slot, ["old_log_probs"])
    differences = np.abs(computed["old_log_probs"].values - rows["rollout_log_probs"].values)
    largest, mean = float(differences.max()), float(differences.mean())
    step.record.metrics |= {"training/probe_log_probs_diff_max": largest, "training/probe_log_probs_diff_mean": mean}
    step.log_prob_check.compare(f"the weights of step {version} in the rollout group", largest, mean)
