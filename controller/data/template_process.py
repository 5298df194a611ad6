"""Renders chat templates in a process of its own, with limits on time and memory.

A chat template is a program that comes with a model. In jinja2's sandbox it can open nothing, but loop and allocate
without end. So one process renders for the controller: a template that takes more than MAX_S seconds of processor time,
or MAX_WALL_S in all, ends the process, and the next call starts another. What it says back is text alone. A process
that is killed from outside says nothing about the template: another one is asked once more.
"""

import atexit
import json
import logging
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rewards.channel import LENGTH_BYTES, framed
from splitppo.machine.children.ending import end, how_it_ended
from splitppo.machine.children.start import python_command

MAX_S = 4  # of processor time, for one request
MAX_WALL_S = 120.0  # until a request is answered, also on a busy machine; a process that was stopped answers none
MAX_BYTES = 2**30  # of memory, beside what the process has at its start
MAX_CHARACTERS = 2**26  # of a rendered text
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_TEXT = b"t"
_ERROR = b"e"
_EXIT_LIMIT_S = 1.0
_MAX_ASKED = 2  # processes, if each is killed before it has answered

log = logging.getLogger(__name__)


class Template:
    """A chat template, which the process renders.

    Raises:
        jinja2.TemplateError: the source is not valid Jinja, or takes too much time or memory.
        ChildProcessError: one process after the other was killed.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        [answer] = _ask(pickle.dumps((source, [None])), 1)
        if isinstance(answer, jinja2.TemplateError):
            raise answer

    def render_all(self, each: Sequence[Mapping[str, Any]]) -> list[str | jinja2.TemplateError]:
        """Renders the template once with each of these mappings of variables, which can be pickled.

        The list ends with the first error: the template fails, or takes too much time or memory.

        Raises:
            ChildProcessError: one process after the other was killed.
        """
        try:
            request = pickle.dumps((self._source, [*map(dict, each)]))
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            return [jinja2.TemplateError(f"a value of them cannot be sent to the process that renders: {error}")]
        return _ask(request, len(each))


class _Killed(Exception):
    """Raised if the process was ended by a signal from outside; the message says how."""


class _Renderer:
    """The process, as its parent sees it."""

    def __init__(self) -> None:
        call = f"from controller.data.template_process import serve; serve({MAX_S}, {MAX_BYTES})"
        self._process = subprocess.Popen(
            python_command(call),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},  # threads take memory, if unused
            start_new_session=True,  # Ctrl-C does not reach it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = self._process.stdin
        self._answers = self._process.stdout
        self.parent = os.getpid()
        self.is_running = True
        self._is_overdue = False

    def ask(self, request: bytes, num_answers: int) -> list[str | jinja2.TemplateError]:
        """Sends a request, and returns the answers to it, up to the first error; _Killed: there are none."""
        answers: list[str | jinja2.TemplateError] = []
        overdue = threading.Timer(MAX_WALL_S, self._end_overdue)
        overdue.daemon = True
        overdue.start()
        try:
            self._requests.write(framed(request))
            self._requests.flush()
            while len(answers) < num_answers and not (answers and isinstance(answers[-1], jinja2.TemplateError)):
                kind = _read(self._answers, 1)
                text = _read_message(self._answers).decode(errors="surrogatepass")
                answers.append(text if kind == _TEXT else jinja2.TemplateError(text))
        except (EOFError, OSError):
            self.is_running = False
            answers.append(jinja2.TemplateError(self._why_it_ended()))
        finally:
            overdue.cancel()
        return answers

    def _end_overdue(self) -> None:
        """Ends a process that does not answer, so that who waits for it is told."""
        self._is_overdue = True
        self._process.kill()

    def close(self) -> None:
        """Ends the process."""
        for stream in (self._requests, self._answers):
            with suppress(OSError):
                stream.close()
        end(self._process, _EXIT_LIMIT_S)

    def _why_it_ended(self) -> str:
        """Waits for the end of the process, and returns its reason as the end of a sentence, e.g. its time limit.

        Raises:
            _Killed: the template is not the reason.
        """
        status = self._process.wait()
        if self._is_overdue:
            return f"the process that renders it has not answered for {MAX_WALL_S:g} s"
        if status == -signal.SIGXCPU:
            return f"it takes more than {MAX_S} s of processor time"
        if -status in _FROM_OUTSIDE:
            raise _Killed(how_it_ended(status))
        return f"the process that renders it {how_it_ended(status)}"


_lock = threading.Lock()
_renderers: list[_Renderer] = []  # at most one


def _ask(request: bytes, num_answers: int) -> list[str | jinja2.TemplateError]:
    """Sends a request to the process; one that is killed meanwhile is replaced, and the next one is asked.

    Raises:
        ChildProcessError: one after the other was killed.
    """
    with _lock:
        for _ in range(_MAX_ASKED):
            try:
                return _ask_once(request, num_answers)
            except _Killed as error:
                how = str(error)
                log.warning("the process that renders chat templates %s", how)
    raise ChildProcessError(f"the process that renders chat templates {how}, {_MAX_ASKED} times in a row")


def _ask_once(request: bytes, num_answers: int) -> list[str | jinja2.TemplateError]:
    """Sends a request to the process, which is started if there is none; _Killed: it was killed meanwhile."""
    if _renderers and _renderers[0].parent != os.getpid():  # this process was forked, and that one is not its own
        _renderers.clear()
    if not _renderers:
        _renderers.append(_Renderer())
    is_answered = False
    try:
        answers = _renderers[0].ask(request, num_answers)
        is_answered = _renderers[0].is_running
    finally:
        if not is_answered:  # also after Ctrl-C: the next request must not get the answers to this one
            close()
    return answers


@atexit.register
def close() -> None:
    """Ends the process, if there is one; the next template starts another."""
    while _renderers:
        _renderers.pop().close()


def serve(max_s: int, max_bytes: int) -> None:
    """Answers requests on standard input until it ends; the main function of the process.

    Each request has `max_s` seconds of processor time, all together `max_bytes` of memory beside what is in use now.
    """
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what else prints to standard output goes to standard error: it must not look like an answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + max_bytes, resource.RLIM_INFINITY))
    while True:
        try:
            request = _read_message(requests)
        except EOFError:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit_s = int(used.ru_utime + used.ru_stime) + 1 + max_s  # the kernel counts from the start of the process
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
        for kind, text in _answers(request):
            answers.write(kind + framed(text.encode(errors="surrogatepass")))
        answers.flush()


def _answers(request: bytes) -> Iterator[tuple[bytes, str]]:
    """Yields (_TEXT, the rendered text) for each mapping of variables, until (_ERROR, why there is none)."""
    try:
        source, each = pickle.loads(request)  # noqa: S301 - of the controller
        template = _compiled(source)
        for variables in each:
            text = "" if variables is None else template.render(variables)
            if len(text) > MAX_CHARACTERS:
                raise jinja2.TemplateError(f"it writes more than {MAX_CHARACTERS:,} characters")
            yield _TEXT, text
    except jinja2.TemplateError as error:
        yield _ERROR, str(error)
    except MemoryError:
        yield _ERROR, "it takes too much memory"
    except Exception as error:  # noqa: BLE001 - the template may raise anything
        yield _ERROR, f"{type(error).__name__}: {error}"


@lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    """Compiles a chat template in jinja2's sandbox, with the settings, filters and functions of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes HTML
    environment.globals.update(raise_exception=_raise_exception, strftime_now=time.strftime)
    return environment.from_string(source)


class _GenerationBlock(jinja2.ext.Extension):
    """The Jinja block `{% generation %}`, which marks text of the assistant for training; rendered as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _read_message(stream: IO[bytes]) -> bytes:
    return _read(stream, int.from_bytes(_read(stream, LENGTH_BYTES)))


def _read(stream: IO[bytes], num_bytes: int) -> bytes:
    content = stream.read(num_bytes)
    if len(content) < num_bytes:
        raise EOFError
    return content
