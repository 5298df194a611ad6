"""A conversation with an agent: it gets an endpoint and a row, asks the policy there, and ends with its rewards.

    RunningConversation      agent's conversation                    agent
    converse(chat, row) -->  gateway.session(chat), start   ------>  run(endpoint, row), or a process
                             Chat.turn, Chat.restart  <-- HTTP ----  chat.completions.create(messages)
    score            <-----  its rewards, or its error  <---------   returns, raises, exits, hangs

An agent that fails before the policy has answered is a failure of the environment. Afterwards the policy may be the
cause: the conversation has the rewards that the agent has given so far.
"""

import asyncio
import errno
import json
import shlex
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from environments.adapters.variables import filled, without_secrets
from environments.chat import Chat, ContextFull, TookTooLong
from environments.gateway.dialogue import MAX_LATE
from environments.gateway.session import Gateway, Session
from environments.loops import EnvironmentFailed
from environments.messages import NO_CALL
from environments.programs.places import Place, Places
from environments.programs.program import Program, TooMuchOutput
from environments.programs.variables import variables_of
from environments.tool_calls.json_calls import MAX_DEPTH, is_deep
from environments.tools import reason_of
from rewards.returned import score_and_fields
from splitppo.config.subsections.multi_turn import EnvironmentConfig, MultiTurnConfig
from splitppo.config_error import ConfigError
from splitppo.machine.children.ending import how_it_ended
from splitppo.user_file import line_in

_NUM_PORTS = 100  # that are tried, from the configured one on
_LAST_PORT = 65_535
_SHOWN_CHARACTERS = 200  # of the last line of a program
_END_LIMIT_S = 5.0  # for an agent that goes on to ask when the policy says no more
_ASKED_ON = (
    f"it was ended, because it asked {MAX_LATE} times more after it was told that the policy has no further turn (error"
    f" 403), and did not end within {_END_LIMIT_S:g} s"
)


class Agents:
    """All that the agents of an environment process share: the gateway that they call, and the places of programs.

    Attributes:
        limit_s: the time that an agent may take to begin, and between an answer and its next request.
    """

    def __init__(self, gateway: Gateway, config: MultiTurnConfig) -> None:
        self.gateway = gateway
        self.places = Places(config.gateway.max_agents)
        self.limit_s = config.timeout_s

    @classmethod
    async def open(cls, config: MultiTurnConfig) -> "Agents":
        """Opens the gateway, at the first free port from the configured one on; ConfigError: it cannot listen there."""
        own = config.gateway
        last = own.port if own.port == 0 else min(own.port + _NUM_PORTS - 1, _LAST_PORT)  # 0: any free port
        for port in range(own.port, last):
            try:
                return cls(await Gateway.open(own.host, port), config)
            except ConfigError as error:
                if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                    raise
        return cls(await Gateway.open(own.host, last), config)

    def function(self, function: Callable[..., Any], name: str, path: Path) -> "FunctionAgent":
        """Returns the agent that is a function of the user's, from this file."""
        return FunctionAgent(function, name, path, self)

    def command(self, key: str, config: EnvironmentConfig) -> "CommandAgent":
        """Returns the agent that is a program; ConfigError names the key if there is none, or a variable is missing."""
        if shutil.which(config.command[0]) is None:
            raise ConfigError(f"key '{key}.command': there is no program {config.command[0]!r}")
        variables = {name: filled(value, f"{key}.env.{name}") for name, value in config.env.items()}
        return CommandAgent(config, variables, self)


@dataclass(frozen=True)
class FunctionAgent:
    """An agent that is a function of the user's, async or not.

    Attributes:
        function: gets the endpoint and the row.
        name: the function and its file, for errors.
        path: the file.
        agents: what it shares with others.
    """

    function: Callable[..., Any]
    name: str
    path: Path
    agents: Agents

    async def converse(self, chat: Chat, row: Mapping[str, Any]) -> Any:
        """Calls the function, and returns its rewards."""
        session = self.agents.gateway.session(chat)
        questions = Questions(chat, session)
        run = partial(self.function, session.endpoint, {**row, "seed": chat.seed})
        hurrying = asyncio.create_task(_hurry(session, chat.hurry))
        try:
            returned = await chat.runner(NO_CALL, run)
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything
            is_cut_off = isinstance(error, TookTooLong) and session.asks_on.is_set()
            reason = _ASKED_ON if is_cut_off else reason_of(error)
            return questions.settle(None, f"{self.name}{line_in(self.path, error)}", reason)
        else:
            return questions.settle(returned, self.name)
        finally:
            hurrying.cancel()
            session.close()


@dataclass(frozen=True)
class CommandAgent:
    """An agent that is a program, a process for each conversation; see `EnvironmentConfig` for its settings."""

    config: EnvironmentConfig
    variables: Mapping[str, str]
    agents: Agents

    async def converse(self, chat: Chat, row: Mapping[str, Any]) -> Any:
        """Runs the program to its end, and returns its rewards."""
        takes_rewards = self.config.reward == "endpoint"
        session = self.agents.gateway.session(chat, takes_rewards=takes_rewards)
        given = {**row, "seed": chat.seed}
        if takes_rewards:
            given["reward_key"] = session.reward_key
        try:
            return await _ProgramTalk(self, chat, session, given).run()
        finally:
            session.close()


class Questions:
    """Counts what an agent asks the policy, and settles with which rewards or failure the agent has ended.

    Attributes:
        num_open: the questions without an answer.
        num_answered: those that the policy has answered.
    """

    def __init__(self, chat: Chat, session: Session, on_change: Callable[[], None] = lambda: None) -> None:
        """Counts from now on; `on_change` is called whenever a question begins or ends."""
        self.num_open = 0
        self.num_answered = 0
        self._chat = chat
        self._session = session
        self._on_change = on_change
        self._is_refused = False  # the latest question had no room in the context
        chat.around = self._question

    @asynccontextmanager
    async def _question(self) -> AsyncIterator[None]:
        """Surrounds a question to the policy."""
        self.num_open += 1
        self._is_refused = False
        self._on_change()
        try:
            yield
            self.num_answered += 1
        except ContextFull:
            self._is_refused = True
            raise
        finally:
            self.num_open -= 1
            self._on_change()

    def settle(self, rewards: Any, name: str, error: str = "") -> Any:
        """Returns the rewards of an agent that has ended, and notes its failure, if the policy may be the cause.

        An end is no failure if the agent ends by itself after it was told that the policy says no more, or that there
        is no room. An agent that never asks the policy has failed.

        Args:
            rewards: None, a number, or a dict with score; anything else is a failure.
            name: what the agent is called in errors.
            error: why it has failed; empty: it has not.

        Raises:
            EnvironmentFailed: it has failed before the policy has answered, so the policy cannot be the cause; or the
                gateway has failed.
        """
        if self._session.failure is not None:
            raise EnvironmentFailed(f"{name}: {reason_of(self._session.failure)}")
        is_told = self._session.is_over.is_set() or self._is_refused
        if is_told and error != _ASKED_ON:
            error = ""
        elif not is_told and not error and not self.num_answered:
            error = "it ended without an answer" if self._session.refused else "it never asked the policy"
        mistake = _mistake_in(rewards)
        if mistake:
            rewards = None
            error = error or mistake
        if error:
            refused = self._session.refused
            if refused not in error:
                error = f"{error}; its last request was refused: {refused}"
            reason = without_secrets(f"{name}: {error}")
            if not self.num_answered:
                raise EnvironmentFailed(reason)
            is_wrong = bool(mistake or refused)
            self._chat.pending = replace(self._chat.pending, agent_error=reason, agent_is_wrong=is_wrong)
        return rewards


def _mistake_in(rewards: Any) -> str:
    """Returns what is wrong with the rewards of an agent; empty if nothing is."""
    if rewards is not None:
        try:
            score_and_fields(rewards, "the agent")
        except (TypeError, ValueError) as error:
            return str(error)
    return ""


async def _hurry(session: Session, hurry: Callable[[float], None]) -> None:
    """Shortens the time of an agent that goes on to ask when the policy says no more."""
    await session.asks_on.wait()
    hurry(_END_LIMIT_S)


class _ProgramTalk:
    """One conversation with a program, which may be ended while it waits for the policy, and started again."""

    def __init__(self, agent: CommandAgent, chat: Chat, session: Session, given: Mapping[str, Any]) -> None:
        self._config = agent.config
        self._places = agent.agents.places
        self._limit_s = agent.agents.limit_s
        self._session = session
        self._questions = Questions(chat, session, self._show_waiting)
        self._given = (json.dumps(given, default=str) + "\n").encode()
        self._variables = variables_of(session.endpoint, agent.variables)
        self._must_leave = asyncio.Event()
        self._is_answered = asyncio.Event()  # there is no question without an answer
        self._running: tuple[Place, asyncio.Timeout] | None = None  # while a program runs

    async def run(self) -> Any:
        """Runs the program until it ends, and returns its rewards."""
        while True:
            async with self._places.place(self._must_leave.set) as place:
                program = await Program.start(
                    self._config.command, self._variables, self._given, marker=self._session.endpoint.api_key
                )
                try:
                    error = await self._failure_of(program, place)
                finally:
                    await program.end()
            if error is not None:
                return self._rewards(program, error)
            await self._is_answered.wait()
            self._session.restarted()

    async def _failure_of(self, program: Program, place: Place) -> str | None:
        """Waits for the end of a program, and returns why it has failed; empty if it has not.

        None: it still runs, waits for the policy, and has to leave its place to another program.
        """
        self._must_leave.clear()
        leaving = asyncio.create_task(self._must_leave.wait())
        ending = asyncio.create_task(program.exit_code())
        hurrying = asyncio.create_task(_hurry(self._session, self._give_time))
        try:
            async with asyncio.timeout(None) as limit:
                self._running = place, limit
                self._show_waiting()
                await asyncio.wait([leaving, ending], return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                return None
            if code := ending.result():
                return f"it {how_it_ended(code)}: {program.reason}"
        except TimeoutError:
            if self._session.asks_on.is_set():
                return _ASKED_ON
            until = "until its next request (rollout.multi_turn.timeout_s)"
            return f"it took longer than {self._limit_s:g} s {until}: {program.reason}"
        except TooMuchOutput as error:
            return str(error)
        finally:
            self._running = None
            leaving.cancel()
            ending.cancel()
            hurrying.cancel()
        return ""

    def _show_waiting(self) -> None:
        """Lets the time limit stand still, and the place be given away, while the program waits for the policy.

        It is called whenever a question begins or ends, and when a program has started.
        """
        is_waiting = self._questions.num_open > 0
        if is_waiting:
            self._is_answered.clear()
        else:
            self._is_answered.set()
        if self._running is None:
            return
        self._give_time(None if is_waiting else self._limit_s)
        self._places.set_idle(self._running[0], is_idle=is_waiting)

    def _give_time(self, limit_s: float | None) -> None:
        """Lets the program that runs take so many seconds from now on; None: any number."""
        limit = None if self._running is None else self._running[1]
        if limit is not None and not limit.expired():
            limit.reschedule(None if limit_s is None else asyncio.get_running_loop().time() + limit_s)

    def _rewards(self, program: Program, error: str) -> Any:
        """Returns the rewards of a program that has ended, by the way that the configuration names.

        A program that gives none by this way has failed.
        """
        rewards = None
        missing = ""
        if self._config.reward == "endpoint":
            rewards = self._session.posted
            missing = "it posted no reward (POST /v1/reward with reward_key of its row), as reward: endpoint expects"
        elif self._config.reward == "output":
            rewards = _printed(program.last_printed)
            line = program.last_printed
            shown = f"its last line is {line[:_SHOWN_CHARACTERS]!r}" if line else "it printed nothing"
            missing = f"{shown}, expected a JSON object with score, by reward: output"
        if not error and not self._questions.num_answered and not self._session.refused:
            error = f"it never asked the policy: {program.reason}"
        elif not error and rewards is None:
            error = missing
        return self._questions.settle(rewards, shlex.join(self._config.command), error)


def _printed(line: str) -> Any:
    """Returns what the last line of a program says if it is a JSON object with score; a bare number is text.

    What is nested too deep to be handled as plain values is text, too.
    """
    try:
        printed = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_reward = isinstance(printed, dict) and "score" in printed and not is_deep(printed, MAX_DEPTH)
    return printed if is_reward else None
