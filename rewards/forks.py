"""Forks child processes of the controller from one that has imported their code: in milliseconds, not in a second.

The template has one thread and runs no code of a user's, so no connection or random state of the user's is shared. What
the user wrote is loaded behind the fork.
"""

import asyncio
import os
import pkgutil
import signal
import sys
from pathlib import Path

from rewards.channel import work
from splitppo.machine.children.forks import Forked, ForkServer, serve_forks
from splitppo.machine.children.parent import end_with
from splitppo.machine.children.start import python_command

_MAX_STARTS = 3  # templates in a row that ended before they forked
_FORK_LIMIT_S = 120.0  # of a template; the first fork comes when it has imported the code
_STDERR = 2


class Template:
    """A process from which others are forked; started with the first one, and again if it has been killed.

    Args:
        serve: "module:function", what the children run, see `channel.work`; the template imports it.
    """

    def __init__(self, serve: str) -> None:
        self._command = python_command(f"from rewards.forks import be_template; be_template({serve!r})")
        self._server: ForkServer | None = None

    async def fork(self, connection: int, memory: int) -> Forked:
        """Forks a child, which gets these two descriptors.

        Must be called in the thread of the event loop: the template ends with the thread that started it.

        Raises:
            ChildProcessError: templates do not stay alive.
        """
        for _ in range(_MAX_STARTS):
            server = self._running_server()
            forked = _forked_from(server, connection, memory)
            if await asyncio.to_thread(forked.has_begun_within, _FORK_LIMIT_S):
                return forked
            server.end()
        raise ChildProcessError(f"could not be forked: {_MAX_STARTS} templates in a row have ended")

    def _running_server(self) -> ForkServer:
        """Returns the template as a server that forks; starts it if there is none, or it has ended."""
        if self._server is None or self._server.poll() is not None:
            # A template that was killed has taken its children with it.
            self._server = ForkServer(self._command, os.environ, _STDERR, lost_code=-signal.SIGKILL)
        return self._server

    def end(self) -> None:
        """Ends the template, also one that is stopped, and with it all children."""
        if self._server is not None:
            self._server.end()


def _forked_from(server: ForkServer, connection: int, memory: int) -> Forked:
    with Path(os.devnull).open() as nothing:
        return server.fork(None, nothing.fileno(), _STDERR, (connection, memory))


def be_template(serve: str) -> None:
    """Runs the template: forks children until the controller has ended; the last two arguments are those of a server.

    The children end with the template.
    """
    control, controller_pid = map(int, sys.argv[-2:])
    end_with(controller_pid)
    pkgutil.resolve_name(serve)
    template_pid = os.getpid()

    def run(_request: None, connection: int, memory: int) -> int:
        work(serve, connection, memory, template_pid)
        return 0

    serve_forks(control, run)
