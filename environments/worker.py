"""The controller's side of one environment process: what it is told, and how its end is noticed."""

import asyncio
import logging
import mmap
import os
import pickle
import weakref
from collections.abc import Sequence

from environments.messages import MARKS, NO_CALL, TIMED_OUT, Answer, Reply, Report, Request, Setup
from rewards.process import ProcessEnded, WorkerProcess

log = logging.getLogger(__name__)

_START_LIMIT_S = 120.0  # importing the user's files
_GRACE_S = 2.0  # added to a call's time limit before a process that gives no sign of life is killed


class ProcessLost(Exception):
    """Raised if a process ended, or was killed, before a conversation was answered; the message says "it ...".

    Attributes:
        was_running: True if code of this conversation ran at that moment, so that it may be the cause.
        call: the number of the call that was made for it; NO_CALL: none.
    """

    def __init__(self, reason: str, *, was_running: bool = False, call: int = NO_CALL) -> None:
        super().__init__(reason)
        self.was_running = was_running
        self.call = call


class EnvironmentProcess:
    """One life of a child process that holds conversations: started when it is first used, then used until it ends.

    Attributes:
        num_open: the conversations in it.
        num_stuck: the calls in it that took too long and still run.
        lost: why it has ended; empty: it has not.
    """

    def __init__(self, setup: Setup) -> None:
        descriptor = os.memfd_create("marks")
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, 2 * MARKS)
        self.num_open = 0
        self.num_stuck = 0
        self.lost = ""
        self._marks = mmap.mmap(descriptor, 2 * MARKS)
        self._limit_s = setup.timeout_s + _GRACE_S
        self._waiting: dict[int, asyncio.Future[Sequence[Answer]]] = {}
        serve, fds = "environments.process:serve", [descriptor]
        self._worker = WorkerProcess(
            serve, setup, descriptor, shared_fds=fds, decode=pickle.loads, start_limit_s=_START_LIMIT_S
        )
        self._report: asyncio.Future[Report] | None = None
        self._life: asyncio.Task[None] | None = None

    async def load(self) -> Report:
        """Starts the process if it has not been, and returns its report; ProcessLost: it gave none."""
        if self._report is None:
            self._report = asyncio.get_running_loop().create_future()
            self._life = asyncio.create_task(self._live(self._report))
        return await asyncio.shield(self._report)

    async def ask(self, request: Request) -> Sequence[Answer]:
        """Tells a conversation something and returns its answers; ProcessLost: there are none."""
        await self.load()
        if self.lost:
            raise ProcessLost(self.lost)
        self._waiting[request.conversation] = answers = asyncio.get_running_loop().create_future()
        self._worker.send(request)
        try:
            answered: Sequence[Answer] = await answers
            return answered
        finally:
            self._waiting.pop(request.conversation, None)

    def forget(self, conversation: int) -> None:
        """Ends a conversation of which no answer is wanted any more."""
        self.num_open -= 1
        self._worker.send(Request(conversation, is_abandoned=True))

    async def end(self) -> None:
        """Ends the process, also in the middle of a call."""
        if self._life is not None:
            self._life.cancel()
        self._lose("has been ended")
        await self._worker.end()

    async def _live(self, report: asyncio.Future[Report]) -> None:
        """Starts the process, and hears it until it ends."""
        try:
            report.set_result(await self._worker.load())
            while True:
                reply: Reply | None = await self._worker.receive(self._limit_s)
                if reply is None:
                    continue  # a sign of life
                self.num_stuck = reply.num_stuck
                answers = self._waiting.get(reply.conversation)
                if answers is not None and not answers.done():
                    answers.set_result(reply.answers)
        except (TimeoutError, ProcessEnded) as error:
            self._lose(str(error) or TIMED_OUT)
            log.warning("an environment process is replaced: it %s", self.lost)

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        if self._report is not None and not self._report.done():
            self._report.set_exception(ProcessLost(reason))
        for conversation, answers in self._waiting.items():
            place = conversation % MARKS
            if not answers.done():
                lost = ProcessLost(reason, was_running=bool(self._marks[MARKS + place]), call=self._marks[place])
                answers.set_exception(lost)
