"""Finds out whether a rank was killed by the kernel because memory had run out, or by somebody else."""

import resource
import signal
import threading
import time

from splitppo.machine.host_memory import host_memory, num_oom_kills

_INTERVAL_S = 0.5
# A process that is killed may need this long until its memory is free and it has ended.
_DYING_S = 60.0
_GIB = 1 << 30


class OomWatch:
    """Watches free memory and the kernel's out-of-memory kills twice a second, to explain why a rank was killed.

    The watch runs in the parent process of the ranks, as a thread.
    """

    def __init__(self) -> None:
        self._num_kills = num_oom_kills()
        self._memory = host_memory()
        self._same_at = time.monotonic()
        threading.Thread(target=self._watch, name="oom-watch", daemon=True).start()

    def _watch(self) -> None:
        """Keeps the last measure of memory and the kernel's count of kills from before a kill, for `explain`.

        After a new kill both stay as they are while a killed rank may still be ending. If no rank has ended by then,
        the kill was that of a stranger, and its count becomes the one to compare with.
        """
        while True:
            time.sleep(_INTERVAL_S)
            num_kills = num_oom_kills()
            now = time.monotonic()
            if num_kills == self._num_kills:
                self._memory = host_memory()
                self._same_at = now
            elif now - self._same_at > _DYING_S:  # it was no rank
                self._num_kills = num_kills

    def explain(self, exit_code: int) -> str:
        """Returns the end of the error about a killed rank: that memory ran out, GiB used and free; else empty.

        `exit_code` is the rank's, negative for a signal.
        """
        if exit_code != -signal.SIGKILL or num_oom_kills() == self._num_kills:
            return ""
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
        return (
            f", by the kernel for want of memory: it had {largest / _GIB:.1f} GiB at most,"
            f" {self._memory.free / _GIB:.1f} of {self._memory.total / _GIB:.1f} GiB were free"
        )
