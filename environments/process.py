"""The code of an environment process: it loads the user's files once, then holds many conversations at the same time.

The user's sync code runs in threads, one per conversation, and his async code in the event loop of the process.
"""

import asyncio
import ctypes
import json
import logging
import mmap
import os
import pickle
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from types import coroutine
from typing import Any

from environments.chat import Chat, ContextFull, ConversationOver, TookTooLong, ToolCall, Turn
from environments.loading import Loaded, Parse, load_agents, load_environments, load_parser, load_servers
from environments.loops import EnvironmentFailed
from environments.messages import MARKS, NO_CALL, TIMED_OUT, Answer, Begin, NoRoom, Reply, Request, Said, Schemas, Setup
from environments.output import bounded_output
from environments.tool_calls.json_calls import bad_call, call_of
from environments.tools import reason_of
from rewards.channel import LENGTH_BYTES, Channel, framed
from rewards.returned import plain, score_and_fields
from splitppo.config.subsections.multi_turn import is_file_and_name
from splitppo.config_error import ConfigError
from splitppo.machine.children.parent import end_with
from splitppo.user_file import line_in

_HEARTBEAT_S = 0.5  # between two signs of life
# In which sync code runs at the same time, without calls that wait for the model, or took too long and still run.
_MAX_THREADS = 64


def serve(channel: Channel, setup: Setup) -> None:
    """Loads what the model talks with, then holds conversations until the controller has ended.

    The first message has the schemas of each environment's tools; it is a ConfigError if a file or a server cannot be
    used.
    """
    end_with(channel.controller_pid)
    os.dup2(2 if setup.output is None else bounded_output(setup.output), 1)
    os.dup2(1, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _log_to_output()
    with asyncio.Runner() as runner:  # sessions with servers, and what agents call, live in its loop
        try:
            servers = runner.run(load_servers(setup.config))
            agents = runner.run(load_agents(setup.config))
            environments = load_environments(setup, servers, agents)
            parse = load_parser(setup.tool_format)
        except ConfigError as error:
            return channel.send(pickle.dumps(error))
        channel.send(pickle.dumps({name: loaded.schemas for name, loaded in environments.items()}))
        process = Process(setup, environments, parse, channel.shared)
        try:
            runner.run(process.serve(channel))
        except BaseException:  # noqa: BLE001 - the user's code may end the event loop by anything
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)  # threads that are stuck keep nobody waiting


def _log_to_output() -> None:
    """Has this package log to the error output, and leaves what the user's code logs to that code."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("environments")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


class _Stopped(BaseException):
    """Raised in a thread whose call took too long, so that a loop of Python ends."""


class Process:
    """All that conversations of this process share: settings, the user's code, marks for the controller, threads.

    Attributes:
        late: calls that took too long, as futures.
    """

    def __init__(self, setup: Setup, environments: Mapping[str, Loaded], parse: Parse, marks: mmap.mmap) -> None:
        self.config = setup.config
        self.environments = environments
        self.parse = parse
        self.is_users_parse = is_file_and_name(setup.tool_format)
        self.marks = marks
        self.pid = os.getpid()
        self.threads = asyncio.Semaphore(_MAX_THREADS)
        self.late: list[Any] = []
        self._conversations: dict[int, RunningConversation] = {}

    async def serve(self, channel: Channel) -> None:
        """Answers requests; the process ends with its controller."""
        reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=os.dup(channel.fileno())))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_beat(writer))
            while True:
                try:
                    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
                    request: Request = pickle.loads(await reader.readexactly(length))  # noqa: S301 - of the controller
                except (EOFError, ConnectionError):
                    os._exit(0)
                number = request.conversation
                if request.is_abandoned:
                    self._conversations.pop(number).end()
                    continue
                if request.begin is not None:
                    self._conversations[number] = RunningConversation(self, number, request.begin)
                tasks.create_task(self._answer(request, self._conversations[number], writer))

    async def _answer(
        self, request: Request, conversation: "RunningConversation", writer: asyncio.StreamWriter
    ) -> None:
        """Tells a conversation what a request says, and writes its answers to the controller, one for each turn.

        A conversation that begins has one answer more, at first. Once it is over, further turns get no answer.
        """
        answers = [await conversation.next_answer()] if request.begin else []
        for turn in request.turns:
            if not (answers and answers[-1].is_over):
                conversation.said.put_nowait(turn)
                answers.append(await conversation.next_answer())
        self.late = [call for call in self.late if not call.done()]
        writer.write(framed(pickle.dumps(Reply(request.conversation, answers, len(self.late)))))


class _Call:
    """A call of the user's code: its time limit, and its place among the sync calls that run at the same time.

    While the call waits for the model it gives its place away, and its time limit stands still; afterwards it has the
    whole limit again.

    Attributes:
        is_queued: True while it waits for a place.
    """

    def __init__(self, limit_s: float, places: asyncio.Semaphore | None) -> None:
        """Makes a call that needs one of these places; None: it needs none."""
        self.is_queued = False
        self._limit_s = limit_s
        self._limit = asyncio.timeout(None)
        self._places = places
        self._has_place = False
        self._is_timed = False
        self._num_questions = 0  # to the model that are open

    @property
    def is_running(self) -> bool:
        """True from its begin until it has ended, or has taken too long."""
        return self._is_timed and not self._limit.expired()

    async def run(self, start: Callable[[], "asyncio.Task[Any]"]) -> bool:
        """Takes a place, starts the call and waits for it; returns False if it has taken too long."""
        await self._take_place()
        task = start()
        try:
            async with self._limit:
                self._is_timed = True
                self._start_limit()
                await asyncio.wait([task])
        except TimeoutError:
            pass
        finally:
            self._is_timed = False
            self._give_place()
        return task.done()

    def pause(self) -> None:
        """Begins a question to the model."""
        self._num_questions += 1
        if self._num_questions == 1:
            self._limit.reschedule(None)
            self._give_place()

    async def go_on(self) -> None:
        """Ends a question to the model."""
        self._num_questions -= 1
        if self._num_questions == 0 and self.is_running:
            await self._take_place()
        if self.is_running:
            self._start_limit()
        else:
            self._give_place()

    def hurry(self, limit_s: float) -> None:
        """Lets the call take so many seconds from now on, if it does not wait for the model."""
        self._limit_s = min(self._limit_s, limit_s)
        if self.is_running and not self._num_questions:
            self._start_limit()

    def _start_limit(self) -> None:
        self._limit.reschedule(asyncio.get_running_loop().time() + self._limit_s)

    async def _take_place(self) -> None:
        if self._places is not None:
            self.is_queued = True
            try:
                await self._places.acquire()
            finally:
                self.is_queued = False
            self._has_place = True

    def _give_place(self) -> None:
        if self._places is not None and self._has_place:
            self._has_place = False
            self._places.release()


class UserCode:
    """Runs the user's code of one conversation; a `Runner`.

    Attributes:
        turn: the number of the turn whose calls are made, from 1.
    """

    def __init__(self, process: Process, conversation: int, skipped: Mapping[tuple[int, int], str]) -> None:
        self.turn = 0
        self._process = process
        self._place = conversation % MARKS
        self._skipped = skipped
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._thread_id = 0
        self._calls: set[_Call] = set()  # that have begun and have not ended

    @property
    def is_queued(self) -> bool:
        """True if a call waits until others give it a place."""
        return any(call.is_queued for call in self._calls)

    async def __call__(self, call: int, function: Callable[[], Any]) -> Any:
        """Runs a function of the user's, see `Runner`."""
        if (reply := self._skipped.get((self.turn, call))) is not None:
            raise TookTooLong if reply == TIMED_OUT else ChildProcessError(reply)
        limit_s = self._process.config.timeout_s
        running = _Call(limit_s, None if iscoroutinefunction(function) else self._process.threads)
        work = list[Any]()

        def start() -> asyncio.Task[Any]:
            self._process.marks[self._place] = min(call, 255)
            task = asyncio.create_task(self.run(function, work))
            work.append(task)
            return task

        self._calls.add(running)
        try:
            is_done = await running.run(start)
        finally:
            self._calls.discard(running)
            self._process.marks[self._place] = NO_CALL
            for task in work[:1]:
                task.cancel()
        if not is_done:
            self._give_up(work)
            raise TookTooLong(f"it took longer than {limit_s:g} s (rollout.multi_turn.timeout_s)")
        if work[0].cancelled():
            raise RuntimeError("it was cancelled")
        return work[0].result()

    async def run(self, function: Callable[[], Any], work: list[Any]) -> Any:
        """Runs a function of the user's without a time limit; adds to `work` the future of what runs in a thread."""
        try:
            if iscoroutinefunction(function):
                value: Any = function()
            else:
                work.append(self._thread.submit(self._in_thread, function))
                value = await asyncio.wrap_future(work[-1])
                work.pop()
            return await _marked(value, self._mark) if isawaitable(value) else value
        except (Exception, asyncio.CancelledError, ConversationOver):
            raise
        except BaseException as error:  # such as SystemExit, which would end the event loop
            raise RuntimeError(reason_of(error)) from error

    @asynccontextmanager
    async def waits_for_model(self) -> AsyncIterator[None]:
        """Surrounds a question to the model: calls that wait for its turn meanwhile hinder no other conversation."""
        waiting = [call for call in self._calls if call.is_running]
        is_running = MARKS + self._place
        was_running = self._process.marks[is_running]
        for call in waiting:
            call.pause()
        self._process.marks[is_running] = 0
        try:
            yield
        finally:
            for call in waiting:
                await call.go_on()
            if any(call.is_running for call in waiting):
                self._process.marks[is_running] = was_running

    def hurry(self, limit_s: float) -> None:
        """Lets the calls that run take so many seconds from now on; see `Chat.hurry`."""
        for call in self._calls:
            call.hurry(limit_s)

    def close(self) -> None:
        """Ends the conversation's thread as soon as nothing runs in it."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _give_up(self, work: list[Any]) -> None:
        """Leaves a call that took too long to itself: later calls have another thread."""
        self._process.late.append(work[-1])
        if len(work) > 1:
            stop = ctypes.pythonapi.PyThreadState_SetAsyncExc
            stop(ctypes.c_ulong(self._thread_id), ctypes.py_object(_Stopped))
            self.close()
            self._thread = ThreadPoolExecutor(max_workers=1)

    def _in_thread(self, function: Callable[[], Any]) -> Any:
        """Runs the user's code in this thread; a mark in shared memory tells the controller that it is running."""
        self._thread_id = threading.get_ident()
        self._mark(1)
        try:
            return function()
        except StopIteration as error:  # which no future can carry
            raise RuntimeError(reason_of(error)) from error
        finally:
            self._mark(0)

    def _mark(self, is_running: int) -> None:
        """Marks whether the user's code runs now. A child that it forked and that comes back here ends."""
        if os.getpid() != self._process.pid:
            os._exit(1)
        self._process.marks[MARKS + self._place] = is_running


@coroutine
def _marked(awaitable: Any, mark: Callable[[int], None]) -> Generator[Any, Any, Any]:
    """Waits for an awaitable, with a mark while its code runs."""
    steps = awaitable.__await__()
    step = partial(next, steps)
    while True:
        mark(1)
        try:
            future = step()
        except StopIteration as end:
            return end.value
        finally:
            mark(0)
        try:
            yield future
            step = partial(next, steps)
        except BaseException as error:  # noqa: BLE001 - it belongs to the awaitable
            step = partial(steps.throw, error)


class RunningConversation:
    """A conversation that runs in this process, from its beginning to its end.

    Attributes:
        said: the turns of the model that it has not answered yet; None: there is none any more.
    """

    def __init__(self, process: Process, number: int, begin: Begin) -> None:
        self.said: asyncio.Queue[Said | NoRoom | None] = asyncio.Queue()
        self._process = process
        self._loaded = process.environments[begin.environment]
        self._user_code = UserCode(process, number, begin.skipped)
        limit = process.config.max_parallel_calls
        self._chat = Chat(
            begin.seed, limit, self._user_code, self._exchange, hurry=self._user_code.hurry, told=begin.told
        )
        self._answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._schemas: list[Schemas | None] = []  # of each turn's context, see `Answer.tools`
        self._task = asyncio.create_task(self._converse(begin.row))

    def end(self) -> None:
        """Ends the conversation where it is, if it has not ended."""
        self._task.cancel()

    async def next_answer(self) -> Answer:
        """Waits for the next answer; a coroutine of the user's must give it within the time limit."""
        limit_s = self._process.config.timeout_s
        while True:
            try:
                async with asyncio.timeout(limit_s if self._loaded.is_users_coroutine else None):
                    return await self._answers.get()
            except TimeoutError:
                if not self._user_code.is_queued:  # behind others, whose fault it is
                    self.end()
                    reason = f"it took longer than {limit_s:g} s (rollout.multi_turn.timeout_s)"
                    return Answer(is_over=True, lost=f"{self._loaded.name}: {reason}")

    async def _converse(self, row: Mapping[str, Any]) -> None:
        """Runs the conversation to its end, and puts its last answer, which says by what it was lost, if it was."""
        final = None
        lost = ""
        converse = partial(self._loaded.converse, self._chat, row)
        try:
            final = _final(await (self._user_code.run(converse, []) if self._loaded.is_users_coroutine else converse()))
            lost = "" if self._chat.has_begun else f"{self._loaded.name}: it ended without asking for a turn"
        except (ConversationOver, ContextFull):
            pass
        except EnvironmentFailed as error:
            lost = str(error)
        except Exception as error:  # noqa: BLE001 - the user's coroutine may raise anything
            place = line_in(self._loaded.path, error) if self._loaded.path else ""
            lost = f"{self._loaded.name}{place}: {reason_of(error)}"
        finally:
            self._user_code.close()
        self._answers.put_nowait(replace(self._chat.pending, is_over=True, final=final, lost=lost))

    async def _exchange(self, answer: Answer) -> Turn:
        """Gives the model an answer, and returns the model's next turn with its calls; a `Chat` is given this function.

        The turn also begins the next answer, with its text before the calls and those calls that a chat template can
        write. Raises ConversationOver if no turn comes any more, ContextFull if the answer had no room.
        """
        self._answers.put_nowait(answer)
        async with self._user_code.waits_for_model():
            said = await self.said.get()
        if said is None:
            self.said.put_nowait(None)  # for whoever asks again
            raise ConversationOver
        if isinstance(said, NoRoom):
            raise ContextFull(
                f"the messages have {said.num_tokens} tokens, and one more must fit; the context has room for"
                f" {said.room.context}, the response for {said.room.response}"
            )
        self._user_code.turn += 1
        self._schemas.append(self._schemas_after(answer))
        before, calls = await self._read_calls(said.text)
        in_template = tuple(
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
            if not call.error
        )
        self._chat.pending = Answer(text=before, calls=in_template, num_calls=len(calls))
        return Turn(
            said.text,
            calls,
            said.ended_by,
            room=said.room,
            number=self._user_code.turn,
            num_context_tokens=said.num_context_tokens,
            num_tokens=said.num_tokens,
            log_probs=said.log_probs,
        )

    def _schemas_after(self, answer: Answer) -> Schemas | None:
        """Returns the tools of the context in which an answer stands; None: those of the environment."""
        if answer.begins_context:
            return answer.tools
        if answer.after_turn is not None:
            return self._schemas[answer.after_turn - 1]
        return self._schemas[-1] if self._schemas else None

    async def _read_calls(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Reads the calls of the latest turn by the schemas of its context.

        Calls that the turn only thinks of are none, and without tools there are none; a coroutine of the user's that
        names no tools may have some all the same.
        """
        own = self._schemas[-1]
        schemas = self._loaded.schemas if own is None else own
        may_call = schemas or (own is None and self._loaded.is_users_coroutine)
        if not may_call:
            return text, ()
        parse = self._process.parse
        if self._process.is_users_parse:
            thought, mark, rest = text.rpartition("</think>")
            try:
                before, calls = _plain_calls(await self._user_code(NO_CALL, partial(parse, rest, schemas)))
            except Exception as error:
                raise EnvironmentFailed(f"rollout.multi_turn.tool_format: {reason_of(error)}") from error
            before = thought + mark + before
        else:
            before, calls = parse(text, schemas)
        turn = self._user_code.turn
        return before, tuple(replace(call, id=f"call{turn:03d}{place:02d}") for place, call in enumerate(calls))


async def _beat(writer: asyncio.StreamWriter) -> None:
    """Tells the controller that the event loop of this process runs."""
    while True:
        writer.write(framed(pickle.dumps(None)))
        await asyncio.sleep(_HEARTBEAT_S)


def _plain_calls(parsed: Any) -> tuple[str, Sequence[ToolCall]]:
    """Reads what a parser of the user's returned, as values that the controller can load."""
    before, calls = parsed
    return plain(before), [call if call.error else _plain_call(call) for call in calls]


def _plain_call(call: ToolCall) -> ToolCall:
    try:
        return call_of(json.loads(json.dumps({"name": call.name, "arguments": call.arguments})))
    except RecursionError:
        return bad_call("its arguments are nested too deep")


def _final(result: Any) -> Mapping[str, Any] | None:
    """Reads what `get_reward`, or the user's coroutine, returned: nothing, a number, or a dict with 'score'."""
    if result is None:
        return None
    score, fields = score_and_fields(result, "the environment")
    return {"score": score, **{str(key): plain(value) for key, value in fields.items()}}
