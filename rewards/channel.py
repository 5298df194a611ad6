"""The controller's end and the process's end of a conversation: messages of a length and as many bytes.

Imported by the processes, so it stays light.
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
    """Returns a message as it is sent."""
    return len(content).to_bytes(LENGTH_BYTES) + content


def shared_number(descriptor: int) -> c_int:
    """Returns the number that both ends see in a file in memory."""
    return c_int.from_buffer(mmap.mmap(descriptor, sizeof(c_int)))


class Channel:
    """The end of the process: it takes requests, and answers each.

    Attributes:
        controller_pid: the process at the other end.
    """

    def __init__(self, connection: socket.socket, controller_pid: int) -> None:
        self.controller_pid = controller_pid
        self._connection = connection
        self._messages = connection.makefile("rwb")

    def fileno(self) -> int:
        """Returns the descriptor, which is hung up when the controller is gone."""
        return self._connection.fileno()

    def receive(self) -> bytes:
        """Waits for the next request. EOFError: there will be none."""
        return self._read(int.from_bytes(self._read(LENGTH_BYTES)))

    def _read(self, num_bytes: int) -> bytes:
        content = self._messages.read(num_bytes)
        if len(content) < num_bytes:
            raise EOFError
        return content

    def send(self, content: bytes) -> None:
        """Sends an answer."""
        self._messages.write(framed(content))
        self._messages.flush()


def work(serve: str, descriptor: int, controller_pid: int) -> None:
    """Does the work of a process, until the controller is gone.

    `serve` is the function that does it, as "module:function"; it is given the channel and what is received first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor), controller_pid)
    with suppress(EOFError, ConnectionError):
        arguments = pickle.loads(channel.receive())  # noqa: S301 - of the controller
        pkgutil.resolve_name(serve)(channel, *arguments)
