"""The resource limits of a code answer: CPU time, memory, processes, files, output."""

import math
from enum import Enum
from typing import Any

from splitppo.config.subsections.code import CodeConfig
from splitppo.machine.cores import permitted_cores

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


def wall_s(config: CodeConfig) -> float:
    """Returns the time limit on the clock in seconds: three times the CPU time: programs may wait and cores be busy."""
    return 3.0 * config.timeout_s


def num_sandboxes(config: CodeConfig) -> int:
    """Returns the number of sandboxes in which programs run at the same time."""
    return permitted_cores().num_whole if config.num_sandboxes == "auto" else int(config.num_sandboxes)


def limits_of_guest(config: CodeConfig, uid: int) -> dict[str, Any]:
    """Returns the arguments of guest.py: its uid, and the limits that the kernel sets for each of its processes."""
    rlimits = {
        "RLIMIT_AS": config.memory_mb << 20,
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": math.ceil(config.timeout_s) + 1,
        "RLIMIT_FSIZE": TMP_BYTES,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_NOFILE": _MAX_OPEN_FILES,
        "RLIMIT_STACK": _STACK_BYTES,
    }
    if not config.unsafe:  # without a sandbox it would count all processes of this user
        rlimits["RLIMIT_NPROC"] = config.max_processes + 2  # the guest, and the process that exceeds the limit
    return {"uid": uid, "nice": _NICE, "output_bytes": config.max_output_bytes, "rlimits": rlimits}
