"""The limits of a code answer, and their names in its result."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

TMP_BYTES = 64 << 20
MAX_FILES = 10_000
_NICE = 10
_MAX_OPEN_FILES = 64
_STACK_BYTES = 128 << 20  # programs recurse
# The field of a result with the name of the limit that the program exceeded, or None.
CODE_LIMIT = "code_limit"


class Limit(Enum):
    """A limit that a program exceeded. Its value is the field CODE_LIMIT of the result and part of a metric's name."""

    TIME = "time"  # CPU time, or time on the clock
    MEMORY = "memory"  # files in /tmp count
    PROCESSES = "processes"  # too many at a time; or they outlived the program; or it ended its sandbox
    FILES = "files"  # too many in /tmp, or too large ones
    OUTPUT = "output"


@dataclass(frozen=True)
class Limits:
    """The resources that an answer may use, in all its tests and processes together.

    Attributes:
        cpu_s: user and system time.
        max_processes: processes and threads at a time.
    """

    cpu_s: float = 10.0
    memory_bytes: int = 1 << 30
    max_processes: int = 32
    output_bytes: int = 32 << 20

    @property
    def wall_s(self) -> float:
        """Seconds on the clock: three times the CPU time, since a program may wait and cores may be busy."""
        return 3.0 * self.cpu_s

    def of_guest(self, uid: int, *, is_confined: bool) -> dict[str, Any]:
        """Returns the guest's arguments: its uid, and the limits that the kernel sets for each of its processes."""
        rlimits = {
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": math.ceil(self.cpu_s) + 1,
            "RLIMIT_FSIZE": TMP_BYTES,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_NOFILE": _MAX_OPEN_FILES,
            "RLIMIT_STACK": _STACK_BYTES,
        }
        if is_confined:  # without a sandbox it would count all processes of this user
            rlimits["RLIMIT_NPROC"] = self.max_processes + 2  # the guest, and the process that exceeds the limit
        return {"uid": uid, "nice": _NICE, "output_bytes": self.output_bytes, "rlimits": rlimits}
