"""Keeps `live.json` up to date: in which step the run is, and what each worker group does."""

import asyncio
from collections.abc import Callable, Sequence

from controller.tracking.events import (
    Closing,
    Ended,
    Event,
    GroupLost,
    Progressed,
    Restored,
    RolloutRestarted,
    Started,
    StepBegun,
)
from controller.workers.clients import WorkerClient
from splitppo.run_folder.live import IDLE, LiveFile
from splitppo.v1 import worker_pb2

_POLL_S = 5.0
_POLL_TIMEOUT_S = 2.0


class LiveStatus:
    """The sink of live.json; `file` is written by the thread that records."""

    def __init__(self, file: LiveFile) -> None:
        self.file = file

    def receive(self, event: Event) -> None:
        """Sets what the file says."""
        file = self.file
        match event:
            case Progressed():
                progress = event.progress
                counts = {"done": progress.done, "total": progress.total}
                file.set_pool(event.role, method=event.method, phase=progress.phase or None, **counts)
            case Started():
                file.set(step=event.resumed_at, total_steps=event.total_steps)
            case StepBegun():
                file.set(step=event.step)
            case GroupLost():
                file.set(phase="recovering")
                file.idle(event.place.role)
            case RolloutRestarted():
                file.set(phase="training")
            case Restored():
                file.set(step=event.step, phase="training")
            case Closing():
                file.set(phase="closing")
            case Ended():
                file.end()

    async def poll(self, clients: Callable[[], Sequence[WorkerClient]]) -> None:
        """Asks every group for its status every 5 s, without end. The calls of the run say what is wrong, if any is."""
        while True:
            asked = clients()
            calls = (asyncio.wait_for(client.get_status(), _POLL_TIMEOUT_S) for client in asked)
            answers = await asyncio.gather(*calls, return_exceptions=True)  # a channel that is closed cancels its call
            for client, status in zip(asked, answers, strict=True):
                self._set_status(client.role, None if isinstance(status, BaseException) else status)
            await asyncio.sleep(_POLL_S)

    def _set_status(self, role: str, status: worker_pb2.GetStatusResponse | None) -> None:
        """Sets what a group has told; None: it has not answered."""
        if status is None:
            self.file.set_pool(role, state=None, queue=None)
            return
        state = worker_pb2.WorkerState.Name(status.state).removeprefix("WORKER_STATE_").lower()
        told = {"state": state, "queue": status.queued_commands, "committed_step": status.committed_step}
        self.file.set_pool(role, **told, **({} if status.running_method else IDLE))
