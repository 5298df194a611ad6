"""Asks the actor for what its own update computes, for the responses whose tokens are recorded (tracking.rollouts).

It serves the record alone: whatever fails here is missing there, and the run goes on.
"""

import asyncio
import logging

import numpy as np

from controller.step.context import StepContext
from controller.tracking.record.sampling import choose
from splitppo.batch import Batch
from splitppo.v1 import batch_pb2

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


async def observed_rows(step: StepContext) -> Batch:
    """Returns the column `observed`, which marks the responses that the record will choose; none without a record.

    They are chosen in a thread, as large steps take a while.
    """
    record, nothing = step.record, Batch(step.record.experience.batch.num_rows, {})
    if not step.config.tracking.rollouts.enable:
        return nothing

    def chosen() -> Batch:
        why_B = choose(record.tokens.numbers, record.scores, step.config, step.number)
        return Batch.from_rows(observed=(why_B != 0)[:, None].astype(np.uint8))

    try:
        return await asyncio.to_thread(chosen)
    except Exception as error:  # noqa: BLE001 - the record must not end a run
        log.warning("step %d: no response is observed in the update: %s", step.number, error)
        return nothing


async def observed_columns(step: StepContext) -> Batch | None:
    """Fetches the log-probs and entropies of the update that the actor has just made; None if it has none."""
    if not step.config.tracking.rollouts.enable:
        return None
    slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_OBSERVED, step=step.number)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await step.workers.actor.get_batch(slot, ["update_log_probs", "update_entropy"])
    except Exception as error:  # noqa: BLE001 - the record must not end a run
        log.info("step %d: the record lacks the numbers of the actor's update: %s", step.number, error)
        return None
