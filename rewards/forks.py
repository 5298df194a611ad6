"""Forks child processes of the controller from one that has imported their code: in milliseconds, not in a second.

The template has one thread and runs no code of a user's, so no connection or random state of the user's is shared. What
the user wrote is loaded behind the fork.
"""

import asyncio
import os
import pkgutil
import signal
import socket
import sys
import time
from pathlib import Path

from rewards.channel import work
from splitppo.machine.children.forks import Forked, ForkServer, serve_forks
from splitppo.machine.children.parent import end_with
from splitppo.machine.children.start import python_command

_MAX_STARTS = 3  # templates in a row that ended before they forked
_FORK_LIMIT_S = 120.0  # of a template; the first fork comes when it has imported the code
_REFUSED_S = 30.0  # how long a machine may refuse further processes
_REFUSED_PAUSE_S = 0.5
_STDERR = 2


class Template:
    """A process from which others are forked; started with the first one, and again if it has been killed.

    Args:
        serve: "module:function", what the children run, see `channel.work`; the template imports it.
    """

    def __init__(self, serve: str) -> None:
        self._command = python_command(f"from rewards.forks import be_template; be_template({serve!r})")
        self._server: ForkServer | None = None

    async def fork(self, memory: int) -> tuple[Forked, socket.socket]:
        """Forks a child, and returns it with the socket to it; the child gets the socket's other end and `memory`.

        Each attempt has a socket of its own. A template may be killed after a fork, before it has told the pid; the
        child that nobody knows finds its socket closed then, and ends.

        Must be called in the thread of the event loop: the template ends with the thread that started it.

        Raises:
            ChildProcessError: templates do not stay alive, or the machine refuses further processes.
        """
        began_s = time.monotonic()
        num_ended = 0
        while num_ended < _MAX_STARTS:
            server = self._running_server()
            forked, connection = _forked_from(server, memory)
            has_begun = False
            try:
                has_begun = await asyncio.to_thread(forked.has_begun_within, _FORK_LIMIT_S)
            finally:
                if not has_begun:
                    connection.close()
            if has_begun:
                return forked, connection
            if not forked.refusal:
                server.end()
                num_ended += 1
            elif time.monotonic() - began_s > _REFUSED_S:
                raise ChildProcessError(f"could not be forked: {forked.refusal}")
            else:  # the template is well, and so are its other children
                await asyncio.sleep(_REFUSED_PAUSE_S)
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


def _forked_from(server: ForkServer, memory: int) -> tuple[Forked, socket.socket]:
    """Asks for a child with a new socket; returns our end of it, too."""
    ours, theirs = socket.socketpair()
    with theirs, Path(os.devnull).open() as nothing:
        return server.fork(None, nothing.fileno(), _STDERR, (theirs.fileno(), memory)), ours


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
