"""Sends rollouts to groups that did not sample them, each part once."""

import asyncio
from collections.abc import Iterable

from controller.step.parts import RolloutPart
from controller.workers.clients import WorkerClient
from splitppo.batch import Batch
from splitppo.config.sections.teacher import TeacherConfig


class RowsSentOnce:
    """Sends each part of the rollouts to a group once, although several models of the group need it."""

    def __init__(self) -> None:
        self._sent: set[int] = set()
        self._sending = asyncio.Lock()

    async def send(self, host: WorkerClient, teacher: TeacherConfig | None, part: RolloutPart) -> None:
        """Sends prompts and responses of one part to a group, or waits until another call has sent them.

        `teacher` is given if there are several teachers: each row then has the number of its own.
        """
        async with self._sending:
            if part.slot.part not in self._sent:
                names = ("prompts", "responses", "places")
                rows = part.rollouts.select(name for name in names if name in part.rollouts)
                if teacher is not None:
                    rows = rows.merge(teacher_numbers(teacher, [row.data_source for row in part.prompts.rows]))
                await host.put_batch(part.slot, rows)
                self._sent.add(part.slot.part)


def teacher_numbers(teacher: TeacherConfig, data_sources: Iterable[str]) -> Batch:
    """Returns the column `teachers` of rows of these data sources: the number of each row's teacher."""
    return Batch.from_rows(teachers=[[teacher.number_of(source)] for source in data_sources])
