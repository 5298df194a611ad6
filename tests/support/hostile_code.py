"""Hostile code answers with their expected results: run by this user, by another user, and in a container.

    python -m tests.support.hostile_code FILE...   # JSON: by name, score and limit; no answer may see these files

Every program prints the right answer, 49, only if its attack succeeds.
"""

import asyncio
import json
import sys
from collections.abc import Iterable

from rewards.manager import RewardManager
from rewards.samples import Sample, Scored
from splitppo.config import RewardConfig

CODE = {"memory_mb": 256, "max_processes": 16, "max_output_bytes": 1 << 20, "num_sandboxes": 2}
SECRET = "SPLITPPO_TEST_SECRET"

# By name: the limit that the program exceeds, or None if its attack has no effect; and the program.
PROGRAMS: dict[str, tuple[str | None, str]] = {
    "fork bomb": ("processes", "import os\nwhile True: os.fork()"),
    "fork bomb that takes no for an answer": (
        "processes",
        "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)",
    ),
    "threads": (
        "processes",
        "import threading, time\n"
        "for _ in range(100): threading.Thread(target=time.sleep, args=(99,)).start()\n"
        "print(49)",
    ),
    "10 GB": ("memory", "x = bytearray(10 * 2**30)\nprint(49)"),
    "memory of many processes": (
        "memory",
        "import os, time\n"
        "for _ in range(4):\n    if not os.fork(): break\n"
        "x = b'x' * (100 << 20)\ntime.sleep(99)\nprint(49)",
    ),
    "shared memory without a mapping": (None, "import mmap\nmmap.mmap(-1, 1 << 20)\nprint(49)"),
    "a large file": ("files", "with open('/tmp/x', 'wb') as file:\n    while True: file.write(b'x' * (1 << 20))"),
    "many files": ("files", "for n in range(10**6): open(f'/tmp/{n}', 'w').close()\nprint(49)"),
    "1 GB of output": ("output", "import sys\nfor _ in range(1000): sys.stdout.write('x' * (1 << 20))"),
    "sleep": ("time", "import time\ntime.sleep(1000)\nprint(49)"),
    "a busy loop": ("time", "while True: pass"),
    "busy loops": ("time", "import os\nos.fork(), os.fork()\nwhile True: pass"),
    "a daemon": (
        "processes",
        "import os, time\n"
        "if not os.fork():\n    os.setsid()\n    os.write(1, b'49')\n    time.sleep(1000)\n"
        "time.sleep(0.1)",
    ),
    "kills its parent": (None, "import os\nos.kill(os.getppid(), 9)\nos.kill(1, 9)\nos.kill(-1, 9)\nprint('here')"),
    "interrupts its parent": (
        None,
        "import os, signal\nfor number in signal.valid_signals(): os.kill(os.getppid(), number)\nprint('here')",
    ),
    "limits its parent": (
        None,
        "import os, resource\n"
        "for name in ('RLIMIT_CPU', 'RLIMIT_FSIZE', 'RLIMIT_NOFILE', 'RLIMIT_AS'):\n"
        "    try: resource.prlimit(os.getppid(), getattr(resource, name), (0, 0))\n"
        "    except PermissionError: continue\n"
        "    print(49)",
    ),
    "sockets": (None, "import socket\nsocket.socket()\nprint(49)"),
    "a namespace": (None, "import ctypes\nif not ctypes.CDLL(None).unshare(0x10000000): print(49)"),
    "becomes root": (None, "import os\nif not os.getuid(): print(49)\nos.setuid(0)\nprint(49)"),
    "looks for what is expected": (
        None,
        "import gc\n"
        "given, found = input(), [one for one in gc.get_objects() if type(one) is dict and 'tests' in one]\n"
        "texts = [repr(value) for one in found for name, value in one.items() if name != 'program']\n"
        "texts = [text.replace(given, '') for text in texts]\n"
        "if not texts or any(str(7 * 7) in text for text in texts): print(7 * 7)",
    ),
    "reads": (
        None,
        "import os\nseen = list(filter(os.path.exists, input().split()))\n"
        f"if seen or {SECRET!r} in os.environ or os.path.exists('/proc'): print(49)",
    ),
    "writes": (
        None,
        "import os\nfor place in [*input().split(), '/x', '/usr/lib/x', '/guest.py', '/dev/x', '/bin/x']:\n"
        "    try: open(place, 'w')\n    except OSError: continue\n    print(49)",
    ),
}


def answer(program: str) -> str:
    """Returns a response with a program."""
    return f"```python\n{program}\n```"


async def judge(programs: Iterable[str], files: Iterable[str], timeout_s: float) -> list[Scored]:
    """Runs programs whose input is the names of `files`, and returns their results."""
    row = {"inputs": [" ".join(files) + "\n"], "outputs": ["49"]}
    samples = [Sample("apps", answer(program), row) for program in programs]
    async with RewardManager(
        RewardConfig.model_validate({"code": {**CODE, "timeout_s": timeout_s}}), ["apps"]
    ) as manager:
        return await manager.score(samples)


async def results(files: Iterable[str]) -> dict[str, tuple[float, str | None]]:
    """Returns score and limit of all hostile programs, and of an honest program that comes last."""
    results: dict[str, tuple[float, str | None]] = {}
    for is_slow in (True, False):  # the others get enough time for a busy machine
        programs = {name: text for name, (limit, text) in PROGRAMS.items() if (limit == "time") is is_slow}
        programs |= {} if is_slow else {"honest": "print(7 * 7)"}
        scored = await judge(programs.values(), files, 0.5 if is_slow else 20.0)
        for name, result in zip(programs, scored, strict=True):
            results[name] = result.score, result.extra.get("code_limit", result.message)
    return results


def expected() -> dict[str, tuple[float, str | None]]:
    """Returns the results that `results` must have."""
    return {**{name: (0.0, limit) for name, (limit, _) in PROGRAMS.items()}, "honest": (1.0, None)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(results(sys.argv[1:]))))
