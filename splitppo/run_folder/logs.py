"""The names of the logs of a run, and how a process writes one."""

import io
import logging
from collections.abc import Sequence
from pathlib import Path

from splitppo.plain_file import open_plain

LOGS = "logs"
CONTROLLER_LOG = "controller_0.log"
ENVIRONMENTS_LOG = "environments.log"
TRACKERS_LOG = "trackers.log"


class LogFile(logging.FileHandler):
    """Appends records to a log file; OSError if there is something else in its place, such as a pipe."""

    def _open(self) -> io.TextIOWrapper:
        stream = open_plain(Path(self.baseFilename), "ab")
        return io.TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace")


def log_of_rank(role: str, rank: int) -> str:
    """Returns the name of the log of a rank."""
    return f"{role}_{rank:d}.log"


def log_before(name: str) -> str:
    """Returns the name that a log of a rank gets when its group is started again."""
    return f"{name}.old"


def log_of_torchrun(role: str) -> str:
    """Returns the name of the file with what torchrun and its ranks print."""
    return f"{role}_torchrun.log"


def log_of_template(roles: Sequence[str]) -> str:
    """Returns the name of the file with what the process prints from which the groups of these roles are forked."""
    return f"{'_'.join(roles)}_template.log"
