"""The tracker process: `feed` sends what a run folder holds and comes to hold, `check NAME ...` says what is missing.

`feed` reads one line from its standard input, a `protocol.Order`. It ends once that input has ended and everything is
sent, or after the order's flush timeout. What the user should know are lines of its standard output; all else, and what
clients print, goes to its standard error. Only one process at a time feeds the trackers of a run. It needs the clients
and the standard library, so that any Python can run it.
"""

import fcntl
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TextIO

from controller.tracking.trackers.catalog import connect
from controller.tracking.trackers.checks import problem
from controller.tracking.trackers.feed import Feed
from controller.tracking.trackers.protocol import Order
from rewards.code.tree import children_of

log = logging.getLogger("controller.tracking.trackers")

_LOCK_INTERVAL_S = 0.2


def main(arguments: list[str]) -> int:
    """Runs a command; 0 done, 1 something was not sent, 2 a tracker cannot be used."""
    command, *names = arguments
    if command == "feed":
        return feed(Order.parse(sys.stdin.readline()))
    problems = [sentence for name in names if (sentence := problem(name))]
    sys.stdout.write("\n".join(problems))
    return 2 if problems else 0


def feed(order: Order) -> int:
    """Feeds all trackers of a run until standard input has ended; 0 if each got everything."""
    folder = order.run.folder
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever stops a run's processes one and all stops the controller
        signal.signal(number, signal.SIG_IGN)
    _divide_output()
    ending = _Ending(order.flush_timeout_s)
    (folder / "trackers").mkdir(parents=True, exist_ok=True)
    with (folder / "trackers" / "lock").open("a") as lock:
        if not _locked(lock, ending):
            log.warning("another process is feeding the trackers of %s", folder)
            return 1
        feeds = [Feed(name, order.run, connect, ending.has_begun) for name in order.trackers]
        threads = [threading.Thread(target=one.run, name=one.name, daemon=True) for one in feeds]
        for thread in threads:
            thread.start()
        ending.has_begun.wait()
        for thread in threads:
            thread.join(ending.left_s)
        late = [one.name for one in feeds if not one.is_done]
        if late:
            log.warning("%s lacks steps; `python -m controller sync %s` sends them", ", ".join(late), folder)
        return int(bool(late))


class _Ending:
    """The time after which no more lines are written: it begins once standard input has ended."""

    def __init__(self, timeout_s: float) -> None:
        self.has_begun = threading.Event()
        self._timeout_s = timeout_s
        self._deadline_s = 0.0
        threading.Thread(target=self._wait, daemon=True).start()

    @property
    def left_s(self) -> float:
        """Seconds that may still be spent on sending."""
        return max(self._deadline_s - time.monotonic(), 0.0)

    def _wait(self) -> None:
        sys.stdin.read()
        self._deadline_s = time.monotonic() + self._timeout_s
        self.has_begun.set()


def _locked(lock: TextIO, ending: _Ending) -> bool:
    """Waits for the process of an earlier start to end; False if it does not before this one has to."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if ending.has_begun.is_set() and not ending.left_s:
                return False
            time.sleep(_LOCK_INTERVAL_S)
        else:
            return True


def _divide_output() -> None:
    """Sends what we say from INFO on to standard output, and everything, with what clients print, to standard error."""
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    to_file, to_user = logging.StreamHandler(), logging.StreamHandler(told)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_user.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    to_user.setLevel(logging.INFO)
    to_user.addFilter(lambda record: record.name.startswith(log.name))
    logging.raiseExceptions = False  # who listened may be gone, and the disk full
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_user], force=True)
    log.setLevel(logging.DEBUG)


def _kill_clients() -> None:
    """Sends SIGKILL to all processes that clients have started."""
    below = children_of(os.getpid())
    for pid in below:
        below += children_of(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    logging.shutdown()
    if status == 1:
        _kill_clients()  # which still try
    os._exit(status)  # clients wait for their servers in exit handlers
