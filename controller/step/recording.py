"""Has the actor's update return what it computes for the responses whose tokens are recorded (tracking.rollouts).

What the actor returns serves the record alone: whatever fails here is missing in the record, and the run goes on.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import numpy as np

from controller.step.context import StepContext
from controller.tracking.record.choice import choose
from splitppo.batch import Batch
from splitppo.v1.batch_pb2 import Slot

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


async def recorded_rows(step: StepContext) -> Batch:
    """Returns the column `recorded`, which marks the responses that the record will choose; none without a record.

    They are chosen in a thread, as large steps take a while.
    """
    record = step.record

    def chosen() -> Batch:
        why_B = choose(record.tokens.numbers, record.scores, step.config, step.number)
        return Batch.from_rows(recorded=(why_B != 0)[:, None].astype(np.uint8))

    rows = await _unless_it_fails(step, "the choice of responses", lambda: asyncio.to_thread(chosen))
    return rows or Batch(record.experience.batch.num_rows, {})


async def update_columns(step: StepContext, slot: Slot) -> Batch | None:
    """Fetches the log-probs and entropies of the update that the actor has just made; None if it has none.

    They are in the step's slot until the next update.
    """
    names = ["update_log_probs", "update_entropy"]
    return await _unless_it_fails(
        step, "the numbers of the actor's update", lambda: step.workers.actor.get_batch(slot, names)
    )


async def _unless_it_fails(step: StepContext, name: str, ask: Callable[[], Awaitable[Batch]]) -> Batch | None:
    """Returns what `ask` returns; None if rollouts are not recorded, or if it fails or takes too long."""
    if not step.config.tracking.rollouts.enable:
        return None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await ask()
    except Exception as error:  # noqa: BLE001 - the record must not end a run
        log.info("step %d: the record lacks %s: %s", step.number, name, error)
        return None
