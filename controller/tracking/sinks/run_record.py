"""The record of a run for people and the browser view: its rollouts, its events, and what it does now.

Everything is written by one thread (`RecordWorker`). What fails there is missing in the record, and nothing else.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from controller.tracking.events import Ended, Event, Started
from controller.tracking.sinks.event_log import EventLog
from controller.tracking.sinks.live_status import LiveStatus
from controller.tracking.sinks.rollout_record import RolloutRecord
from controller.tracking.sinks.worker import RecordWorker
from controller.workers.clients import WorkerClient
from splitppo.config import Config
from splitppo.run_folder.live import LiveFile


class RunRecord:
    """The three sinks of one start of a run that write in a thread.

    Before `Started` nothing is written, as a start may be refused.
    """

    def __init__(self, config: Config, folder: Path, *, run_id: str = "", epoch: int = 0) -> None:
        self._live = LiveStatus(LiveFile(folder, run_id=run_id, epoch=epoch))
        self._worker = RecordWorker(self._live.file.write_if_due, self._write_failure)
        self._events = EventLog(folder, epoch=epoch, submit=self._worker.submit)
        self._rollouts = RolloutRecord(config, folder, self._worker.submit)
        self._has_started = False

    def receive(self, event: Event) -> None:
        """Has written what belongs into the record."""
        self._has_started |= isinstance(event, Started)
        self._live.receive(event)
        if not self._has_started:
            return
        if isinstance(event, Ended):
            self._worker.submit("the end", partial(self._live.file.write_if_due, at_once=True))
        self._events.receive(event)
        self._rollouts.receive(event)

    async def poll(self, clients: Callable[[], Sequence[WorkerClient]]) -> None:
        """Asks every group every few seconds what it does, without end."""
        await self._live.poll(clients)

    def close(self, *, timeout_s: float = 30.0) -> None:
        """Waits until everything is written, for at most `timeout_s` seconds."""
        self._worker.close(timeout_s)

    def _write_failure(self, why: str) -> None:
        self._events.write_failure(why)
