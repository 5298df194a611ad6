"""Names a forked process as `ps` and /proc show it: without that it has the command line of what it was forked from."""

import ctypes
from contextlib import suppress
from pathlib import Path

_PR_SET_NAME = 15  # of Linux' prctl: the name of a thread, at most 15 bytes
_FIRST_FIELD = 3  # what follows the name in /proc/self/stat
_ARG_START = 48  # its fields, as `man 5 proc` counts them: where the command line begins and ends in memory
_ARG_END = 49


def set_process_title(title: str) -> None:
    """Writes a title over this process's command line, cut at its length; does nothing where that is not possible."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode()[:15], 0, 0, 0)
    with suppress(OSError, ValueError, IndexError):
        # The name of the process may contain blanks and brackets.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = (int(fields[number - _FIRST_FIELD]) for number in (_ARG_START, _ARG_END))
        if 0 < start < end:
            # The last byte stays 0: else the kernel shows what follows, the environment, too.
            content = title.encode()[: end - start - 1]
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, content, len(content))
