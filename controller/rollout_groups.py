"""The groups of a step's prompts: what is generated together, and sent on as soon as its last response has ended."""

from __future__ import annotations

import asyncio

import numpy as np

from controller.data import PromptBatch
from splitppo.batch import Batch
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, Slot


class RolloutGroup:
    """Neighbouring prompts of a step, and their responses, which may come while others are still generated.

    Attributes:
        slot: where the services keep its rows: a part of the step's slot, or all of it if this is the only group.
        prompts: its prompts.
        ended: set when the last response has ended, so that the rows can be fetched.
    """

    def __init__(self, slot: Slot, prompts: PromptBatch) -> None:
        self.slot = slot
        self.prompts = prompts
        self.ended = asyncio.Event()
        self._arrived = asyncio.Event()
        self._rollouts: Batch

    def arrive(self, rollouts: Batch) -> None:
        """The rows have been fetched."""
        self._rollouts = rollouts
        self._arrived.set()

    async def rollouts(self) -> Batch:
        """Prompts and responses, ordered by prompt, then sample, as soon as they are here; for any callers."""
        await self._arrived.wait()
        return self._rollouts


def cut_into_groups(prompts: PromptBatch, num_groups: int, step: int) -> list[RolloutGroup]:
    """Cuts the prompts of a step into groups as equal as possible; one group is all of them."""
    if num_groups == 1:
        return [RolloutGroup(whole_slot(step), prompts)]
    return [
        RolloutGroup(Slot(kind=SLOT_KIND_EXPERIENCE, step=step, part=part), prompts.take(places))
        for part, places in enumerate(np.array_split(np.arange(prompts.num_prompts), num_groups), start=1)
    ]


def whole_slot(step: int) -> Slot:
    """The slot of all experience of a step."""
    return Slot(kind=SLOT_KIND_EXPERIENCE, step=step)
