"""Command lines of Python child processes."""

import sys


def python_command(call: str) -> list[str]:
    """Returns the command of a Python process that makes a call, with the import path of this process."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {call}"]
