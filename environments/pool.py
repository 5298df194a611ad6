"""The controller's side of conversations: environment processes, and episodes that outlive them.

A process that ends or does not answer is replaced. Its conversations are repeated in another one, by saying their turns
again; what they call is called again then.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGKILL
from typing import Any, Self

from environments.messages import NO_CALL, TIMED_OUT, Answer, Begin, EndedBy, NoRoom, Said, Schemas, Setup
from environments.record import Replay
from environments.worker import SERVE, EnvironmentProcess, ProcessLost
from rewards.code.limits import num_sandboxes
from rewards.forks import Template
from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.multi_turn import MultiTurnConfig
from splitppo.config_error import ConfigError

_KEY = "rollout.multi_turn.environments"
_MAX_STARTS = 3  # processes in a row that were killed while they loaded the user's files
_MAX_WARY_WORKERS = 8  # processes, once code of a conversation has ended one
_WARY_CONVERSATIONS = 16  # in each of them, if they suffice
_MAX_LOST = 3  # processes that a conversation may lose before it is repeated alone


class EnvironmentProcesses:
    """A pool of processes in which the user's tools and environments run; an async context manager, as it starts them.

    Args:
        config: the section `rollout.multi_turn`.
        tool_format: how the model writes calls, "auto" resolved; None: in no known way.
        output: the file that gets what the user's code prints; None: the controller's error output.
        code: the section `reward.code`: the processes share its sandboxes, as they share `gateway.max_agents`.
        asks_privileged: True if environments are asked what only the critic may learn (`critic.privileged_prompt`).

    Raises:
        ConfigError: on entering: a file of the user's cannot be used; one sentence.
    """

    def __init__(
        self,
        config: MultiTurnConfig,
        code: CodeConfig,
        *,
        tool_format: str | None,
        output: Path | None = None,
        asks_privileged: bool = False,
    ) -> None:
        workers = config.num_workers
        self._num_workers = max(1, min(8, (os.cpu_count() or 2) // 2)) if workers == "auto" else int(workers)
        code = code.model_copy(update={"num_sandboxes": max(1, num_sandboxes(code) // self._num_workers)})
        max_agents = max(1, config.gateway.max_agents // self._num_workers)
        config = config.changed("gateway", {"max_agents": max_agents})
        self._setup = Setup(config, tool_format, output, code, asks_privileged=asks_privileged)
        self._template = Template(SERVE)
        self._processes = [self._new_process()]
        self._max_workers = self._num_workers
        self._may_be_alone = asyncio.Semaphore(max(self._num_workers, _MAX_WARY_WORKERS))
        self._alone: set[EnvironmentProcess] = set()
        self._schemas: Mapping[str, Schemas] = {}
        self._is_open = True

    async def __aenter__(self) -> Self:
        """Loads the user's files in one process; the others start when they are needed."""
        try:
            self._schemas = await self._load()
        except BaseException:
            await self.__aexit__()
            raise
        self._setup = replace(self._setup, is_start=False)
        self._processes += [self._new_process() for _ in range(self._num_workers - 1)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends all processes, also in the middle of a call."""
        self._is_open = False
        await asyncio.gather(*(process.end() for process in (*self._processes, *self._alone)))
        self._template.end()

    async def _load(self) -> Mapping[str, Schemas]:
        """Loads the user's files in the first process; one that is killed by a signal is replaced.

        Raises:
            ConfigError: a file cannot be used, or ends its process.
            ChildProcessError: process after process is killed.
        """
        for _ in range(_MAX_STARTS):
            try:
                return await self._processes[0].load()
            except ProcessLost as lost:
                reason = str(lost)
                if lost.signal is None:
                    raise ConfigError(f"{_KEY}: a process that loaded them {reason}") from lost
                self._processes = [self._new_process()]
        raise ChildProcessError(
            f"{_KEY}: {_MAX_STARTS} processes that loaded them ended, one by one; the last {reason}"
        )

    def _new_process(self) -> EnvironmentProcess:
        return EnvironmentProcess(self._setup, self._template)

    @property
    def config(self) -> MultiTurnConfig:
        """The section `rollout.multi_turn` as the processes have it."""
        return self._setup.config

    def schemas_of(self, data_source: str) -> Schemas:
        """Returns the JSON schemas of the tools that rows of a data source have; () if they have none."""
        return self._schemas.get(self.key_of(data_source), ())

    def begin(
        self,
        data_source: str,
        row: Mapping[str, Any],
        seed: int,
        replay: Replay | None = None,
        *,
        prompt: object = None,
    ) -> "Episode":
        """Returns a conversation that has not been started, about a row: data_source, ground_truth and others.

        `replay`: answers that were recorded; None: nothing is recorded. `prompt`, that of the row, is a field of the
        row for an agent, which makes its own messages.
        """
        key = self.key_of(data_source)
        if self._setup.config.environments[key].is_agent:
            row = {**row, "prompt": prompt}
        return Episode(self, key, row, seed, replay)

    def key_of(self, data_source: str) -> str:
        """Returns the key of `rollout.multi_turn.environments` under which a data source has its environment."""
        return data_source if data_source in self._setup.config.environments else "default"

    def free(self) -> EnvironmentProcess:
        """Returns the process for a conversation: that with the fewest, and if there are others none that is stuck.

        Once code of a conversation has ended a process, there are more of them, so that the next one that ends takes
        fewer conversations with it.
        """
        self._check_open()
        if any(process.was_ended for process in self._processes):
            self._max_workers = max(self._num_workers, _MAX_WARY_WORKERS)
        self._processes = [self._new_process() if process.lost else process for process in self._processes]
        best = min(self._processes, key=lambda process: (process.num_stuck > 0, process.num_open))
        if best.num_open < _WARY_CONVERSATIONS or len(self._processes) >= self._max_workers:
            return best
        self._processes.append(self._new_process())
        return self._processes[-1]

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[EnvironmentProcess]:
        """Gives a new process in which nothing else runs."""
        async with self._may_be_alone:
            self._check_open()
            process = self._new_process()
            self._alone.add(process)
            try:
                yield process
            finally:
                self._alone.discard(process)
                await process.end()

    def _check_open(self) -> None:
        if not self._is_open:  # nobody waits for this answer any more
            raise RuntimeError("the environment processes have been ended")


@dataclass(eq=False)
class Episode:
    """A conversation with one of the user's environments; it goes on in another process if its process is lost.

    One task at a time may call its methods. Recorded answers need no process, until there is none for a turn.
    """

    _pool: EnvironmentProcesses
    _environment: str
    _row: Mapping[str, Any]
    _seed: int
    _replay: Replay | None = None
    _turns: list[Said | NoRoom | None] = field(default_factory=list)
    _answers: list[Answer] = field(default_factory=list)
    _skipped: dict[tuple[int, int], str] = field(default_factory=dict)
    _num_ended: int = 0  # calls that have ended a process in which nothing else ran
    _process: EnvironmentProcess | None = None
    _number: int = 0

    async def start(self) -> Answer:
        """Begins the conversation; the answer's only message, if it has one, belongs to the prompt."""
        return await self._answer()

    async def say(self, text: str, ended_by: EndedBy, **counted: Any) -> Answer:
        """Says a turn of the model, and returns what follows it; `counted` has what else is known of it, see `Said`."""
        return await self._answer(Said(text, ended_by, **counted))

    async def refuse(self, no_room: NoRoom) -> Answer:
        """Says that the latest answer does not fit into the context, and returns the one that takes its place."""
        return await self._answer(no_room)

    async def end(self) -> Answer:
        """Says that the model has no further turn, and returns the last answer."""
        return await self._answer(None)

    def abandon(self) -> None:
        """Ends the conversation where it is; nobody needs it any more."""
        if self._process is not None:
            self._process.forget(self._number)
            self._process = None

    async def _answer(self, *turns: Said | NoRoom | None) -> Answer:
        """Returns the answer to the latest turn: that of the record, or else of the environment."""
        self._turns += turns
        answer = None if self._replay is None else self._replay.find(self._turns)
        if is_new := answer is None:
            answer = await self._answer_of_process()
        self._skipped.update({(self._turn, call): TIMED_OUT for call in answer.timed_out_calls})
        self._answers.append(answer)
        if is_new and self._replay is not None:
            self._replay.add(self._answers)
        if answer.is_over:
            self.abandon()
        return answer

    async def _answer_of_process(self) -> Answer:
        """Has the latest turn answered, however many processes it takes.

        What ran when a process was lost may have been the cause, so it is repeated alone; after a first SIGKILL, which
        mostly comes from outside, with all others. If a process gave no sign of life, all that was in it is repeated
        alone, so that several calls that hang are found at the same time. What is lost again when it is alone is the
        cause: a call of a tool gets a reply that says so and is not made again, all else ends the conversation, and so
        does a second such call.
        """
        num_lost = 0
        is_alone = False
        while True:
            try:
                answer = await (self._ask_alone() if is_alone else self._ask())
            except ProcessLost as lost:
                self._process = None
                num_lost += lost.may_be_cause
                if not is_alone:
                    is_suspect = lost.was_running and (num_lost > 1 or lost.signal != SIGKILL)
                    is_alone = is_suspect or lost.is_hang or num_lost >= _MAX_LOST
                elif lost.call == NO_CALL and not lost.was_running and num_lost < 2 * _MAX_LOST:
                    continue  # it was lost while it started, or between two calls
                elif lost.call == NO_CALL or (self._turn, lost.call) in self._skipped:
                    return self._failed(self._reason_of(lost))
                else:
                    is_alone = False
                    self._skipped[self._turn, lost.call] = str(lost)
                    self._num_ended += 1
                    if self._num_ended > 1:
                        return self._over(lost)
            else:
                num_crashes, _ = self._num_skipped()
                return replace(answer, num_crashes=num_crashes)

    @property
    def _turn(self) -> int:
        """The number of the turn whose calls are made for the next answer; 0: none are, as no turn was said."""
        is_turn = bool(self._turns) and isinstance(self._turns[-1], Said)
        return sum(isinstance(one, Said) for one in self._turns) if is_turn else 0

    def _num_skipped(self) -> tuple[int, int]:
        """Returns how many calls of the latest turn are not made again because they ended their process, or hung."""
        replies = [reply for (turn, _), reply in self._skipped.items() if turn == self._turn]
        num_hung = replies.count(TIMED_OUT)
        return len(replies) - num_hung, num_hung

    def _over(self, lost: ProcessLost) -> Answer:
        """Returns the last answer of a conversation whose calls have ended processes again; it has not failed."""
        num_crashes, num_hung = self._num_skipped()
        return Answer(
            is_over=True,
            num_calls=lost.call,
            num_tool_errors=num_crashes,
            num_timeouts=num_hung,
            num_crashes=num_crashes,
            tool_error=f"a second call {lost}",
        )

    async def _ask(self) -> Answer:
        if self._process is None or self._process.lost:
            return await self._repeat(self._pool.free())
        return (await self._process.ask(self._number, self._turns[-1:]))[0]

    async def _ask_alone(self) -> Answer:
        """Repeats the conversation in a process that has no other one, which then ends, and returns the last answer."""
        async with self._pool.alone() as process:
            try:
                return await self._repeat(process)
            finally:
                self._process = None

    async def _repeat(self, process: EnvironmentProcess) -> Answer:
        """Holds the conversation up to its latest turn in a process, and returns the answer to that turn.

        The environment's answers to earlier turns must equal those of before, else the conversation fails. With
        recorded answers only their number must, since the model has already seen the recorded ones.
        """
        self._process = process
        self._number = process.open()
        begin = Begin(self._environment, self._row, self._seed, self._skipped, tuple(self._answers))
        answers = await process.ask(self._number, tuple(self._turns), begin)
        *again, latest = answers
        said_before = list(map(what_was_said, self._answers))
        said_again = list(map(what_was_said, again))
        if len(said_again) != len(said_before) or (self._replay is None and said_again != said_before):
            return self._failed("it gave other messages than before when it was repeated in a new process")
        return latest

    def _reason_of(self, lost: ProcessLost) -> str:
        """Returns why a conversation has failed that lost its process also when it was alone."""
        if not lost.is_hang:
            return f"it {lost}"
        config = self._pool.config
        label = config.environments[self._environment].label
        what = f"for more than {config.timeout_s:g} s (rollout.multi_turn.timeout_s) it let nothing else run"
        return f"{label}: {what}, as time.sleep in a coroutine does, or a client that is not awaited"

    def _failed(self, reason: str) -> Answer:
        return Answer(is_over=True, lost=f"rollout.multi_turn.environments.{self._environment}: {reason}")


def what_was_said(answer: Answer) -> tuple[object, ...]:
    """Returns what a model learns of an answer: its messages, their context, and whether the conversation is over."""
    context = (answer.begins_context, answer.tools, answer.after_turn)
    return answer.messages, *context, answer.limits, answer.is_over
