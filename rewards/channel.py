"""Sends and receives messages between the controller and a scoring process over a socket, each after its length.

Scoring processes import this module, so it imports nothing heavy.
"""

import mmap
import pickle
import pkgutil
import signal
import socket
from contextlib import suppress

from splitppo.machine.children.parent import signal_at_end_of_parent

LENGTH_BYTES = 8


def framed(content: bytes) -> bytes:
    """Returns a message for the socket: the content's length in LENGTH_BYTES big-endian bytes, then the content."""
    return len(content).to_bytes(LENGTH_BYTES) + content


class Channel:
    """The scoring process's end of its socket to the controller: receives requests and sends answers.

    Attributes:
        shared: memory that the controller sees, too.
        controller_pid: the process id of the controller, at the other end.
    """

    def __init__(self, connection: socket.socket, shared: mmap.mmap, controller_pid: int) -> None:
        self.shared = shared
        self.controller_pid = controller_pid
        self._connection = connection
        self._messages = connection.makefile("rb")

    def fileno(self) -> int:
        """Returns the file descriptor of the socket, on which poll reports a hang-up when the controller has ended."""
        return self._connection.fileno()

    def receive(self) -> bytes:
        """Waits for the next request of the controller and returns its bytes; EOFError if the socket was closed."""
        return self._read(int.from_bytes(self._read(LENGTH_BYTES)))

    def _read(self, num_bytes: int) -> bytes:
        """Reads so many bytes; EOFError if the other side has closed the channel before."""
        content = self._messages.read(num_bytes)
        if len(content) < num_bytes:
            raise EOFError
        return content

    def send(self, content: bytes) -> None:
        """Sends one message to the controller, its length first."""
        self._connection.sendall(framed(content))


def work(serve: str, connection: int, memory: int, controller_pid: int) -> None:
    """Runs `serve`, the main function of a child process of the controller, until the controller has ended.

    `serve` is "module:function". The function is called with a `Channel` and with the pickled arguments in the
    controller's first message. `connection` and `memory` are file descriptors. A process that is stopped goes on when
    the controller ends, and then ends, too.
    """
    signal_at_end_of_parent(signal.SIGCONT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=connection), mmap.mmap(memory, 0), controller_pid)
    with suppress(EOFError, ConnectionError):
        arguments = pickle.loads(channel.receive())  # noqa: S301 - of the controller
        pkgutil.resolve_name(serve)(channel, *arguments)
