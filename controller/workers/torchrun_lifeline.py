"""torchrun that ends, with all its ranks, as soon as its standard input does; takes the flags of torchrun.

The ranks hold the same lifeline (docs/adr/004-lifeline.md), but only once they have started, which takes seconds, and
one that is stopped cannot let go of anything.
"""

import os
import runpy
import select
import threading
import time

from controller.workers.process_tree import descendants, kill

TORCHRUN = "torch.distributed.run"
_POLL_INTERVAL_S = 0.01
_LAUNCHER_HAS_GONE = 3


def _end_with_launcher() -> None:
    """Waits for the end of standard input; nothing is ever written to it, and the ranks wait for the same."""
    poll = select.poll()
    poll.register(0, 0)  # a hang-up is always reported
    while not any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll()):
        pass
    # Until none is left: the main thread may be starting one.
    while ranks := descendants(os.getpid()):
        kill(ranks)
        time.sleep(_POLL_INTERVAL_S)
    os._exit(_LAUNCHER_HAS_GONE)


if __name__ == "__main__":
    threading.Thread(target=_end_with_launcher, name="lifeline", daemon=True).start()
    runpy.run_module(TORCHRUN, run_name="__main__", alter_sys=True)
