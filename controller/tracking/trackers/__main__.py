"""The tracker process: `feed RUN SECONDS NAME ...` sends a run's metrics, `check NAME ...` says which lack packages.

RUN is the descriptor of a file with the run (`protocol.Run`). When standard input has ended, `feed` ends once
everything is sent, or after SECONDS. Lines for the user go to its standard output. Everything else, also the
output of clients, goes to its standard error. Only one process at a time feeds the trackers of a run. The process needs
the clients and the standard library alone, so that any Python can run it.
"""

import fcntl
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import BinaryIO

from controller.tracking.trackers.catalog import connect
from controller.tracking.trackers.checks import problem
from controller.tracking.trackers.feed import Feed
from controller.tracking.trackers.protocol import Run
from rewards.code.tree import children_of
from splitppo.file_lock import try_lock
from splitppo.machine.children.parent import signal_at_end_of_parent
from splitppo.plain_file import open_plain

log = logging.getLogger("controller.tracking.trackers")


def main(arguments: list[str]) -> int:
    """Runs `feed` or `check`; returns 0 on success, 1 if something was not sent, 2 if a tracker cannot be used."""
    command, *names = arguments
    if command == "feed":
        descriptor, flush_timeout_s, *trackers = names
        return feed(_run_in(int(descriptor)), trackers, float(flush_timeout_s))
    problems = [sentence for name in names if (sentence := problem(name))]
    sys.stdout.write("\n".join(problems))
    return 2 if problems else 0


def _run_in(descriptor: int) -> Run:
    """Reads the run from a file that the controller has written; it is read from its beginning."""
    with os.fdopen(descriptor, encoding="utf-8") as file:
        file.seek(0)
        return Run.parse(file.read())


def feed(run: Run, names: Sequence[str], flush_timeout_s: float) -> int:
    """Sends a run's steps to these trackers until standard input has ended; returns 0 if all got everything, else 1."""
    signal_at_end_of_parent(signal.SIGCONT)  # if it is stopped then, it goes on, and ends
    folder = run.folder
    is_ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever stops all processes of a run stops the controller, too
        signal.signal(number, signal.SIG_IGN)
    _divide_output()
    (folder / "trackers").mkdir(parents=True, exist_ok=True)
    with open_plain(folder / "trackers" / "lock", "ab") as lock:
        feeds = [Feed(name, run, connect, is_ending) for name in names]
        threads = [threading.Thread(target=_feed_alone, args=(tracker, lock), daemon=True) for tracker in feeds]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        is_ending.set()
        deadline_s = time.monotonic() + flush_timeout_s
        for thread in threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        if not try_lock(lock):
            log.warning("another process is feeding the trackers of %s", folder)
            return 1
    if late := ", ".join(tracker.name for tracker in feeds if not tracker.is_done):
        log.warning("%s lacks steps; this sends them: %s", late, run.sync)
    return int(bool(late))


def _feed_alone(tracker: Feed, lock: BinaryIO) -> None:
    """Sends steps to one tracker once no earlier process does; the threads of this process share one lock."""
    fcntl.flock(lock, fcntl.LOCK_EX)
    tracker.run()


def _divide_output() -> None:
    """Sends log lines of trackers to standard output, and everything, also the clients' output, to standard error."""
    standard_output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    to_file = logging.StreamHandler()
    to_user = logging.StreamHandler(standard_output)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_user.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    to_user.setLevel(logging.INFO)
    to_user.addFilter(lambda record: record.name.startswith(log.name))
    logging.raiseExceptions = False  # the controller may have ended, or the disk may be full
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_user], force=True)
    log.setLevel(logging.DEBUG)


def _kill_clients() -> None:
    """Sends SIGKILL to all processes that the trackers' clients have started."""
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
        _kill_clients()  # they may still try to send
    os._exit(status)  # the exit handlers of clients would wait for their servers
