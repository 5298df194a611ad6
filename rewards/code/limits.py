"""The limits of a code answer, and the name of each in its result."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

TMP_BYTES = 64 << 20
MAX_FILES = 10_000
_NICE = 10
_MAX_OPEN_FILES = 64
_STACK_BYTES = 128 << 20  # programs recurse
# The field of a code answer that names the limit that it passed; None if it passed none.
CODE_LIMIT = "code_limit"


class Limit(Enum):
    """A limit that was passed; its value is that field of the answer, and part of a metric's name."""

    TIME = "time"  # of the CPU, or on the clock
    MEMORY = "memory"  # files included
    PROCESSES = "processes"  # too many at a time, some that outlived the program, or its sandbox ended by it
    FILES = "files"  # in /tmp: too many, or too large
    OUTPUT = "output"


@dataclass(frozen=True)
class Limits:
    """The resources that an answer may use, over all its tests and processes.

    Attributes:
        cpu_s: user and system time; three times as much on the clock, since a program may wait, and cores may be busy.
        max_processes: threads count.
        output_bytes: of all tests together.
    """

    cpu_s: float = 10.0
    memory_bytes: int = 1 << 30
    max_processes: int = 32
    output_bytes: int = 32 << 20

    @property
    def wall_s(self) -> float:
        """Seconds on the clock."""
        return 3.0 * self.cpu_s

    def of_guest(self, uid: int, *, is_confined: bool) -> dict[str, Any]:
        """Returns the guest's arguments: its uid, and the limits that the kernel enforces on each process."""
        rlimits = {
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": math.ceil(self.cpu_s) + 1,
            "RLIMIT_FSIZE": TMP_BYTES,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_NOFILE": _MAX_OPEN_FILES,
            "RLIMIT_STACK": _STACK_BYTES,
        }
        if is_confined:  # elsewhere it would count everything that this user runs
            rlimits["RLIMIT_NPROC"] = self.max_processes + 2  # the guest, and one by which the limit is passed
        return {"uid": uid, "nice": _NICE, "output_bytes": self.output_bytes, "rlimits": rlimits}
