"""Ends a rank from outside: on SIGTERM or SIGINT, and when standard input ends because the launcher has ended."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable

from splitppo.machine.children.parent import signal_at_end_of_parent

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def drain_on_signal(drain: Callable[[], None]) -> None:
    """Makes SIGTERM and SIGINT call `drain` on a thread of its own; call it on the main thread of rank 0.

    The signal reaches that thread through a socket, so it is noticed even while the main thread is in a collective.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)

    def watch() -> None:
        while received := reader.recv(16):
            log.info("signal %d: draining", received[0])
            drain()

    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.writer = writer  # type: ignore[attr-defined] # open as long as the thread lives
    watcher.start()


def ignore_signals() -> None:
    """Makes a rank other than rank 0 ignore SIGTERM and SIGINT: that rank ends when rank 0 orders the end."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def hold_lifeline() -> None:
    """Ends this process when standard input ends, because the launcher has then ended, and when its parent ends.

    A thread watches standard input. The kernel watches the parent, torchrun: it also ends a process that is stopped.
    """
    signal_at_end_of_parent(signal.SIGKILL)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        log.error("the launcher has gone, leaving at once")
        logging.shutdown()
        os._exit(3)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
