"""Standard input, output and error of a process that was started without them (`2>&-`, some supervisors)."""

import os
import sys


def open_standard_streams() -> None:
    """Opens /dev/null in place of each standard stream that is closed; call it before anything else is opened.

    Else the next file that this process opens would get the number of a standard stream, and what this process or a
    child prints would be written into it.
    """
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: PTH123, SIM115 - open as long as the process runs
            setattr(sys, name, stream)
