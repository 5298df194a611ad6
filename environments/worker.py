"""The controller's side of one environment process: what it is told, and how its end is noticed."""

import asyncio
import itertools
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from signal import SIGKILL

from environments.messages import MARKS, NO_CALL, TIMED_OUT, Answer, Begin, NoRoom, Reply, Request, Said, Schemas, Setup
from rewards.forks import Template
from rewards.process import ProcessEnded, WorkerProcess
from splitppo.config_error import ConfigError

log = logging.getLogger(__name__)

SERVE = "environments.process:serve"  # what the process runs
_START_LIMIT_S = 120.0  # importing the user's files
_GRACE_S = 2.0  # added to a call's time limit before a process that gives no sign of life is killed


@dataclass(eq=False)
class ProcessLost(Exception):
    """Raised if a process ended, or was killed, before a conversation was answered.

    Attributes:
        reason: what follows "it".
        was_running: True if code of this conversation ran at that moment, so that it may be the cause.
        call: the number of the call that was made for it; NO_CALL: none.
        signal: the signal that ended the process; None: none did.
        may_be_cause: True if code of this conversation ran, or of none, so that nobody knows whose it was.
    """

    reason: str
    was_running: bool = False
    call: int = NO_CALL
    signal: int | None = None
    may_be_cause: bool = True

    @property
    def is_hang(self) -> bool:
        """True if the process was killed because it gave no sign of life."""
        return self.reason == TIMED_OUT


class EnvironmentProcess:
    """One life of a child process that holds conversations: started when it is first used, then used until it ends.

    A process in which calls are stuck ends with its last conversation.

    Attributes:
        num_open: the conversations in it.
        num_stuck: the calls in it that took too long and still run.
        lost: why it has ended; empty: it has not.
        was_ended: True if code of a conversation may have ended it: not by SIGKILL, which mostly comes from outside.
    """

    def __init__(self, setup: Setup, template: Template) -> None:
        self.num_open = 0
        self.num_stuck = 0
        self.lost = ""
        self.was_ended = False
        self._limit_s = setup.config.timeout_s + _GRACE_S
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Sequence[Answer]]] = {}
        self._worker = WorkerProcess(SERVE, (setup,), pickle.loads, _START_LIMIT_S, 2 * MARKS, template)
        self._life: asyncio.Task[None] | None = None
        self._loaded: asyncio.Future[Mapping[str, Schemas]] | None = None

    async def load(self) -> Mapping[str, Schemas]:
        """Starts the process if it has not been, and returns the schemas of each environment's tools.

        Raises:
            ConfigError: a file of the user's cannot be used.
            ProcessLost: the process has ended.
        """
        if self._loaded is None:
            self._loaded = asyncio.get_running_loop().create_future()
            self._life = asyncio.create_task(self._live(self._loaded))
        return await asyncio.shield(self._loaded)

    def open(self) -> int:
        """Returns the number of a conversation that is to begin here."""
        self.num_open += 1
        return next(self._numbers)

    async def ask(
        self, conversation: int, turns: Sequence[Said | NoRoom | None], begin: Begin | None = None
    ) -> Sequence[Answer]:
        """Tells a conversation something and returns its answers; ProcessLost: there are none."""
        await self.load()
        if self.lost:
            raise ProcessLost(self.lost)
        self._waiting[conversation] = answers = asyncio.get_running_loop().create_future()
        self._worker.send(Request(conversation, turns, begin))
        try:
            answered: Sequence[Answer] = await answers
            return answered
        finally:
            self._waiting.pop(conversation, None)

    def forget(self, conversation: int) -> None:
        """Ends a conversation of which no answer is wanted any more."""
        self.num_open -= 1
        self._worker.send(Request(conversation, is_abandoned=True))

    async def end(self) -> None:
        """Ends the process, also in the middle of a call."""
        self._lose("has been ended")
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait([self._life])

    async def _live(self, loaded: "asyncio.Future[Mapping[str, Schemas]]") -> None:
        """Starts the process, and hears it until it ends."""
        try:
            first: Mapping[str, Schemas] | ConfigError = await self._worker.load()
            if isinstance(first, ConfigError):
                return loaded.set_exception(first)
            loaded.set_result(first)
            while self.num_open or not self.num_stuck:
                reply: Reply | None = await self._worker.receive(self._limit_s)
                if reply is None:
                    continue  # a sign of life
                self.num_stuck = reply.num_stuck
                answers = self._waiting.get(reply.conversation)
                if answers is not None and not answers.done():
                    answers.set_result(reply.answers)
        except (TimeoutError, ProcessEnded, ChildProcessError) as error:
            self._lose(str(error) or TIMED_OUT, error.signal if isinstance(error, ProcessEnded) else None)
            what = f"gave no sign of life for {self._limit_s:g} s" if self.lost == TIMED_OUT else self.lost
            log.warning("an environment process is replaced: it %s", what)
        finally:
            self._lose("has been replaced")
            await self._worker.end()

    def _lose(self, reason: str, signal: int | None = None) -> None:
        """Fails all that waits for the process, which has ended for this reason; the first reason is kept.

        Each waiting conversation learns whether its code ran just then: shared memory has a mark for that, and the
        number of its call. If no code ran, each of them may have caused the end; else those whose code ran.
        """
        self.lost = self.lost or reason
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(ProcessLost(reason, signal=signal))
        marks = self._worker.shared
        places = {number: number % MARKS for number, answers in self._waiting.items() if not answers.done()}
        running = {number for number, place in places.items() if marks[MARKS + place]}
        self.was_ended |= bool(running) and signal != SIGKILL
        for number, place in places.items():
            was_running = number in running
            may_be_cause = was_running or not running
            self._waiting[number].set_exception(
                ProcessLost(
                    reason, was_running=was_running, call=marks[place], signal=signal, may_be_cause=may_be_cause
                )
            )
