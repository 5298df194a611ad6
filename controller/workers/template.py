"""The template of worker groups as its controller sees it: a process from which torchruns and ranks are forked.

services/runtime/group/template.py is what it runs. It outlives the groups, so that a group which is started again need
not import anything; a template that has died is started anew, and groups that were forked from it go on.
"""

import asyncio
import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from splitppo.logs import FILE_ONLY
from splitppo.machine.children.forks import Forked, ForkServer
from splitppo.plain_file import open_plain, read_plain

log = logging.getLogger(__name__)

TEMPLATE = (sys.executable, "-u", "-m", "services.runtime.group.template")
TAIL_LINES = 20
_POLL_INTERVAL_S = 0.01
_END_LIMIT_S = 5.0  # a process that hangs up is about to end
FORK_LIMIT_S = 20.0  # for a template that has imported everything, and so needs milliseconds


class TemplateFailed(Exception):
    """A template has ended, or the machine gives no further process; the message has the last lines of its log."""


class Template:
    """A template, which is started when the first group is.

    Args:
        command: starts the template.
        num_threads: of its groups' ranks.
        log_file: takes what it prints.
    """

    def __init__(self, command: Sequence[str], num_threads: int, log_file: Path) -> None:
        self._command = command
        self._num_threads = num_threads
        self._log_file = log_file
        self._server: ForkServer | None = None

    def start(self) -> ForkServer:
        """Starts the template unless it runs; it ends with the thread that called this."""
        if self._server is None or self._server.poll() is not None:
            self.end()
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": str(self._num_threads),
                "TOKENIZERS_PARALLELISM": "false",
            }
            # Containers often set this variable. Without bytecode every start compiles torch and transformers.
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            with open_plain(self._log_file, "wb") as output:
                self._server = ForkServer(self._command, environment, output)
            log.info("started the template of the groups, pid %d", self._server.pid, extra=FILE_ONLY)
        return self._server

    def fork(self, request: Mapping[str, object], log_file: Path) -> "Torchrun":
        """Asks for a torchrun, which writes to `log_file`; does not wait until the template has forked it."""
        server = self.start()
        stdin, lifeline = os.pipe()
        with open_plain(log_file, "wb") as output:
            process = server.fork(request, stdin, output.fileno())
        os.close(stdin)
        return Torchrun(process, lifeline, server, self._log_file)

    def end(self) -> None:
        """Kills the template; what was forked from it lives on."""
        if self._server is not None:
            self._server.end()
            self._server = None


class Torchrun:
    """A torchrun that a template was asked for, and its lifeline: when that is cut, the group ends by itself."""

    def __init__(self, process: Forked, lifeline: int, server: ForkServer, log_of_template: Path) -> None:
        self.process = process
        self._lifeline: int | None = lifeline
        self._server = server
        self._log_of_template = log_of_template

    async def started(self) -> bool:
        """Waits until it has been forked; False if its template was killed or hangs, and another one may do it.

        Raises:
            TemplateFailed: the template has ended by itself, or the machine gives no further process.
        """
        limit_s = FORK_LIMIT_S if self._server.has_forked else math.inf
        began_s = time.monotonic()
        while not self.process.pid and self.process.poll() is None:
            if time.monotonic() - began_s > limit_s:
                log.warning("the template of the groups, pid %d, hangs: starting it again", self._server.pid)
                self._server.end()
                return False
            await asyncio.sleep(_POLL_INTERVAL_S)
        if self.process.pid:
            return True
        if self.process.refusal:
            raise TemplateFailed(f"no process could be started: {self.process.refusal}")
        exit_code = self._server.join(_END_LIMIT_S)
        if exit_code is not None and exit_code >= 0:
            raise TemplateFailed(self.said_of_template)
        log.warning("the template of the groups was killed: starting it again")
        return False

    @property
    def said_of_template(self) -> str:
        """The last lines that its template has printed."""
        return last_lines(self._log_of_template)

    def cut_lifeline(self) -> None:
        """Ends the standard input of the group."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def last_lines(file: Path) -> str:
    """Returns the last lines of a log after a heading, for the message of an error."""
    tail = "\n".join(f"  {line}" for line in read_log(file).splitlines()[-TAIL_LINES:])
    return f"last lines of {file}:\n{tail}"


def read_log(file: Path) -> str:
    """Returns the text of a log; empty if it cannot be read."""
    try:
        return read_plain(file).decode(errors="replace")
    except OSError:
        return ""
