"""The controller's side of conversations: environment processes, and episodes that outlive them.

A process that ends or does not answer is replaced. Its conversations are repeated in another one, by saying their turns
again; what they call is called again then.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from environments.messages import NO_CALL, TIMED_OUT, Answer, Begin, EndedBy, Request, Said, Setup
from environments.worker import EnvironmentProcess, ProcessLost
from splitppo.config import ConfigError
from splitppo.config.subsections.multi_turn import MultiTurnConfig

_MAX_LOST = 3  # processes that a conversation may lose before it is repeated alone


class EnvironmentProcesses:
    """A pool of processes in which the user's tools and environments run; an async context manager, as it starts them.

    Args:
        config: the section `rollout.multi_turn`.
        tool_format: how the model writes calls, "auto" resolved; None: in no known way.

    Raises:
        ConfigError: on entering: a file of the user's cannot be used; one sentence.
    """

    def __init__(self, config: MultiTurnConfig, *, tool_format: str | None) -> None:
        self._setup = Setup(config.environments, tool_format, config.timeout_s, config.max_parallel_calls)
        workers = config.num_workers
        num_workers = max(1, min(8, (os.cpu_count() or 2) // 2)) if workers == "auto" else int(workers)
        self._processes = [EnvironmentProcess(self._setup) for _ in range(num_workers)]
        self._alone: asyncio.Queue[EnvironmentProcess] = asyncio.Queue()
        for _ in range(num_workers):
            self._alone.put_nowait(EnvironmentProcess(self._setup))
        self._ending: set[asyncio.Task[None]] = set()
        self._schemas: Mapping[str, Sequence[Mapping[str, Any]]] = {}
        self._numbers = itertools.count()
        self._is_open = True

    async def __aenter__(self) -> Self:
        """Loads the user's files in one process; the others start when they are needed."""
        try:
            report = await self.free().load()
            error, self._schemas = report.error, report.schemas
        except ProcessLost as lost:
            error = f"rollout.multi_turn.environments: a process that loaded them {lost}"
        if error:
            await self.__aexit__()
            raise ConfigError(error)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends all processes, also in the middle of a call."""
        self._is_open = False
        alone = [self._alone.get_nowait() for _ in range(self._alone.qsize())]
        await asyncio.gather(*(process.end() for process in (*self._processes, *alone)), *self._ending)

    def schemas_of(self, data_source: str) -> Sequence[Mapping[str, Any]]:
        """Returns the JSON schemas of the tools that rows of a data source have; () if they have none."""
        return self._schemas.get(self._key_of(data_source), ())

    def begin(self, data_source: str, row: Mapping[str, Any], seed: int) -> "Episode":
        """Returns a conversation that has not been started, about a row: data_source, ground_truth and others."""
        return Episode(self, self._key_of(data_source), row, seed)

    def _key_of(self, data_source: str) -> str:
        return data_source if data_source in self._setup.environments else "default"

    def number(self) -> int:
        """Returns a number that no conversation of any process has had."""
        return next(self._numbers)

    def free(self) -> EnvironmentProcess:
        """Returns the process for a conversation: that with the fewest, and if there are others none that is stuck."""
        self._check_open()
        for place, process in enumerate(self._processes):
            if process.lost or (process.num_stuck and not process.num_open):
                self._ending.add(ending := asyncio.create_task(process.end()))
                ending.add_done_callback(self._ending.discard)
                self._processes[place] = EnvironmentProcess(self._setup)
        return min(self._processes, key=lambda process: (process.num_stuck > 0, process.num_open))

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[EnvironmentProcess]:
        """Lends a process in which nothing else runs."""
        self._check_open()
        process = await self._alone.get()
        if process.lost or process.num_stuck:
            await process.end()
            process = EnvironmentProcess(self._setup)
        try:
            yield process
        finally:
            self._alone.put_nowait(process)

    def _check_open(self) -> None:
        if not self._is_open:  # nobody waits for this answer any more
            raise RuntimeError("the environment processes have been ended")


class Episode:
    """A conversation with one of the user's environments; it goes on in another process if its process is lost.

    One task at a time may call its methods.
    """

    def __init__(self, pool: EnvironmentProcesses, environment: str, row: Mapping[str, Any], seed: int) -> None:
        self._pool = pool
        self._environment = environment
        self._row = row
        self._seed = seed
        self._turns: list[Said | None] = []
        self._answers: list[Answer] = []
        self._skipped: dict[tuple[int, int], str] = {}
        self._process: EnvironmentProcess | None = None
        self._number = 0

    async def start(self) -> Answer:
        """Begins the conversation; the answer's only message, if it has one, belongs to the prompt."""
        return await self._answer()

    async def say(self, text: str, ended_by: EndedBy) -> Answer:
        """Says a turn of the model, and returns what follows it."""
        self._turns.append(Said(text, ended_by))
        return await self._answer()

    async def end(self) -> Answer:
        """Says that the model has no further turn, and returns the last answer."""
        self._turns.append(None)
        return await self._answer()

    def abandon(self) -> None:
        """Ends the conversation where it is; nobody needs it any more."""
        if self._process is not None:
            self._process.forget(self._number)
            self._process = None

    async def _answer(self) -> Answer:
        """Returns the answer to the latest turn, however many processes it takes.

        What ran when a process was lost may have been the cause, so it is repeated alone. What is lost again then is
        the cause: a call of a tool gets a reply that says so and is not made again, all else ends the conversation.
        """
        num_lost, is_alone, answer = 0, False, None
        turn = len(self._turns)
        while answer is None:
            try:
                answer = await (self._ask_alone() if is_alone else self._ask())
            except ProcessLost as lost:
                self._process = None
                num_lost += 1
                if not is_alone:
                    is_alone = lost.was_running or num_lost >= _MAX_LOST
                elif lost.call == NO_CALL or (turn, lost.call) in self._skipped:
                    answer = self._failed(f"it {lost}")
                else:
                    self._skipped[turn, lost.call] = str(lost)
        self._skipped.update({(turn, call): TIMED_OUT for call in answer.timed_out_calls})
        self._answers.append(answer)
        if answer.is_over:
            self.abandon()
        return answer

    async def _ask(self) -> Answer:
        if self._process is None or self._process.lost:
            return await self._repeat(self._pool.free())
        return (await self._process.ask(Request(self._number, self._turns[-1:])))[0]

    async def _ask_alone(self) -> Answer:
        async with self._pool.alone() as process:
            answer = await self._repeat(process)
            self.abandon()
            return answer

    async def _repeat(self, process: EnvironmentProcess) -> Answer:
        """Holds the conversation up to its latest turn in a process; other messages than before are a failure."""
        self._process, self._number = process, self._pool.number()
        process.num_open += 1
        begin = Begin(self._environment, self._row, self._seed, self._skipped)
        answers = await process.ask(Request(self._number, tuple(self._turns), begin))
        before = [(answer.messages, answer.is_over) for answer in self._answers]
        if len(answers) != len(before) + 1 or [(answer.messages, answer.is_over) for answer in answers[:-1]] != before:
            return self._failed("it gave other messages than before when it was repeated in a new process")
        return answers[-1]

    def _failed(self, reason: str) -> Answer:
        return Answer(is_over=True, lost=f"rollout.multi_turn.environments.{self._environment}: {reason}")
