"""Finds and kills a process and all processes that it has started, also stopped ones."""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterable

import psutil

log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.02


def find_processes(pids: Iterable[int]) -> list[psutil.Process]:
    """Returns psutil objects of the existing processes with these pids, which stay distinct if a pid is used again."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return processes


def is_running(process: psutil.Process) -> bool:
    """Returns True if a process exists and has not ended; a zombie counts as ended."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def is_stopped(pid: int) -> bool:
    """Returns True if the process with this pid exists, and a signal such as SIGSTOP or a debugger has stopped it."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def descendants(pid: int) -> list[psutil.Process]:
    """Returns all living processes that a process has started, directly or through others; parents come first."""
    # `Process.children` fails if a single process of the machine may not be read (hidepid=1).
    children = defaultdict(list)
    for process in psutil.process_iter(["ppid"]):
        children[process.info["ppid"]].append(process)
    below = children[pid]
    for process in below:
        below += children[process.pid]
    return [process for process in below if is_running(process)]


def kill_tree(pid: int) -> list[psutil.Process]:
    """Sends SIGKILL to a child of this process, for which nobody has waited yet, and to the child's descendants.

    Returns all of them.
    """
    return kill_trees(find_processes([pid]))


def kill_trees(roots: Iterable[psutil.Process], others: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Sends SIGKILL to the roots that still run, to their descendants and to `others`; returns all of them.

    A root is killed also if its descendants cannot be found. `others` are processes that may have lost their parent
    already.
    """
    running = [root for root in roots if is_running(root)]
    below = []
    for root in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            root.suspend()  # so that it starts no further process
        try:
            below += descendants(root.pid)
        except (OSError, psutil.Error) as error:
            log.error("what process %d has started cannot be found: %s", root.pid, error)
    return kill(dict.fromkeys([*running, *below, *others]))


def kill(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Sends SIGKILL to the given processes, some of which may have ended already; returns all of them."""
    victims = [*processes]
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    return victims


async def wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Waits up to `timeout_s` seconds until none of the processes runs; returns those that still run."""
    left = [*processes]
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not (left := [process for process in left if is_running(process)]):
            break
        await asyncio.sleep(_POLL_INTERVAL_S)
    return left
