"""The resource limits of a code answer: CPU time, memory, processes, files, output."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from splitppo.config.subsections.code import CodeConfig

TMP_BYTES = 64 << 20
MAX_FILES = 10_000
_NICE = 10
_MAX_OPEN_FILES = 64
_STACK_BYTES = 128 << 20  # programs recurse
# The field of a result with the name of the limit that the program exceeded, or None.
CODE_LIMIT = "code_limit"


class Limit(Enum):
    """The kinds of limit that a program can exceed, as results (field CODE_LIMIT) and names of metrics spell them."""

    TIME = "time"  # CPU time, or time on the clock
    MEMORY = "memory"  # files in /tmp count
    PROCESSES = "processes"  # too many at a time; or they outlived the program; or it ended its sandbox
    FILES = "files"  # too many in /tmp, or too large ones
    OUTPUT = "output"


@dataclass(frozen=True)
class Limits:
    """The resources that one code answer may use, in all its tests and processes together.

    Attributes:
        cpu_s: user and system time, in seconds.
        max_processes: processes and threads at the same time.
    """

    cpu_s: float = 10.0
    memory_bytes: int = 1 << 30
    max_processes: int = 32
    output_bytes: int = 32 << 20

    @classmethod
    def of(cls, config: CodeConfig) -> "Limits":
        """Reads the section `reward.code`."""
        return cls(config.timeout_s, config.memory_mb << 20, config.max_processes, config.max_output_bytes)

    @property
    def wall_s(self) -> float:
        """The time limit on the clock in seconds: three times the CPU time, as programs may wait and cores be busy."""
        return 3.0 * self.cpu_s

    def of_guest(self, uid: int, *, is_confined: bool) -> dict[str, Any]:
        """Returns the arguments of guest.py: its uid, and the limits that the kernel sets for each of its processes."""
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
