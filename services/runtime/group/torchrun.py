"""Runs torchrun for a group that listens on loopback only, or on one interface of each of its machines.

    python -m services.runtime.group.torchrun --nproc-per-node 2 -m services.actor --config FILE [--lifeline]

takes torchrun's flags. With `--lifeline` the group ends as soon as standard input ends. The ranks watch standard input
too, but only once they have started, which takes seconds, and a rank that is stopped (SIGSTOP) cannot end itself. If
this process is stopped itself, the kernel wakes it when the launcher ends.
"""

import os
import select
import signal
import sys
import threading
import time

from splitppo.machine.heavy_imports import heavy_imports
from splitppo.machine.parent import signal_at_end_of_parent

_POLL_INTERVAL_S = 0.01
_LAUNCHER_HAS_GONE = 3


def _end_with_launcher() -> None:
    """Waits until standard input ends (the launcher has ended), then kills the ranks and ends this torchrun.

    Nothing is read from standard input, because the ranks wait for its end, too.
    """
    poll = select.poll()
    poll.register(0, 0)  # a hang-up is always reported
    while not any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll()):
        pass
    from splitppo.machine.process_tree import descendants, kill  # here, as the first thing is to wait

    # Repeated until no rank is left, because the main thread may be starting one.
    while ranks := descendants(os.getpid()):
        kill(ranks)
        time.sleep(_POLL_INTERVAL_S)
    os._exit(_LAUNCHER_HAS_GONE)


if __name__ == "__main__":
    if "--lifeline" in sys.argv:
        signal_at_end_of_parent(signal.SIGCONT)
        threading.Thread(target=_end_with_launcher, name="lifeline", daemon=True).start()
    # Else torch's C++ warns of every peer that goes with a stack of twenty lines; `report` prints one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imported now: importing torch takes seconds, in which the lifeline is watched already.
    with heavy_imports():
        from services.runtime.group.closed_group import run_closed_group

    code = run_closed_group(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the clean-up of libraries, which takes seconds.
    os._exit(code)
