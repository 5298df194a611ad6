"""The messages between the controller and a scoring process: a length, then that many bytes.

Scoring processes import this module, so it imports nothing heavy.
"""

import mmap
import pickle
import pkgutil
import signal
import socket
from contextlib import suppress
from ctypes import c_int, sizeof

LENGTH_BYTES = 8


def framed(content: bytes) -> bytes:
    """Returns the bytes of a message: its length, then its content."""
    return len(content).to_bytes(LENGTH_BYTES) + content


def shared_number(descriptor: int) -> c_int:
    """Returns an integer in shared memory: a change in one process is seen in the other.

    `descriptor` is of a file in memory (memfd) that holds one C int.
    """
    return c_int.from_buffer(mmap.mmap(descriptor, sizeof(c_int)))


class Channel:
    """The scoring process's end of the connection to the controller: receives requests and sends answers.

    Attributes:
        controller_pid: the process at the other end.
    """

    def __init__(self, connection: socket.socket, controller_pid: int) -> None:
        self.controller_pid = controller_pid
        self._connection = connection
        self._messages = connection.makefile("rwb")

    def fileno(self) -> int:
        """Returns the descriptor of the connection; poll reports a hang-up when the controller is gone."""
        return self._connection.fileno()

    def receive(self) -> bytes:
        """Waits for the next request and returns it. EOFError if the controller has closed the connection."""
        return self._read(int.from_bytes(self._read(LENGTH_BYTES)))

    def _read(self, num_bytes: int) -> bytes:
        content = self._messages.read(num_bytes)
        if len(content) < num_bytes:
            raise EOFError
        return content

    def send(self, content: bytes) -> None:
        """Sends one message to the controller."""
        self._messages.write(framed(content))
        self._messages.flush()


def work(serve: str, descriptor: int, controller_pid: int) -> None:
    """Runs the main function of a process until the controller is gone.

    `serve` names this function, as "module:function". Its arguments are the channel and those that the controller sends
    first, pickled.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor), controller_pid)
    with suppress(EOFError, ConnectionError):
        arguments = pickle.loads(channel.receive())  # noqa: S301 - of the controller
        pkgutil.resolve_name(serve)(channel, *arguments)
