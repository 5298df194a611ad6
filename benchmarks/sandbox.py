"""Programs per second in sandboxes: taken from those that wait, started when they are needed, and without any.

    python -m benchmarks.sandbox [--programs 200] [--sandboxes 2] [--hostile]

A program adds up numbers and has three tests on stdin. `warm` is a step's answers at once, by the pool; `cold` starts a
sandbox for each program and then runs it; `bare interpreter` is a process per test, without any protection. `one alone`
is a single program, which finds a sandbox waiting or does not.

`--hostile` instead scores answers that give far more than is expected, or as much of it as they may, and shows how long
they keep the event loop from its other work and by how much this process grows meanwhile.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rewards.code.cases import parse_cases
from rewards.code.sandbox import Sandbox
from rewards.code.source import CodeSandboxes
from rewards.samples import Sample
from splitppo.config.subsections.code import CodeConfig

PROGRAM = "n = int(input())\nprint(sum(int(input()) for _ in range(n)))"
ROW = {"inputs": ["2\n1\n2\n", "1\n5\n", "3\n1\n1\n1\n"], "outputs": ["3", "5", "3"]}
REPEATS = 3
CALL = {"inputs": ["1"], "outputs": ["[]"], "fn_name": "f"}
LINES = "".join(f"{number}\n" for number in range(1_500_000))
LARGE = json.dumps({"inputs": ["1500000"], "outputs": [LINES]})
VALUES = json.dumps({"inputs": ["3000000"], "outputs": [json.dumps([[]] * 3_000_000)], "fn_name": "f"})
# By name: the score that is right, the program, and its row.
HOSTILE = {
    "4 M lines for 3": (0.0, "print(*range(4000000), sep='\\n')", json.dumps(ROW)),
    "11 M lists for none": (
        0.0,
        "import os\nos.write(3, b'[' + b'[],' * 11000000 + b'[]]')\nos._exit(0)",
        json.dumps(CALL),
    ),
    "8192 <think>": (0.0, "<think>" * 8192, json.dumps(ROW)),
    "a process that interrupts its parent": (0.0, "import os\nos.kill(os.getppid(), 2)", json.dumps(ROW)),
    "1.5 M lines, as expected": (1.0, "print(*range(int(input())), sep='\\n')", LARGE),
    "1.5 M lines, the last one wrong": (0.0, "print(*range(int(input()) - 1), '1.5', sep='\\n')", LARGE),
    "3 M lists, as expected": (1.0, "def f(n): return [[] for _ in range(n)]", VALUES),
}


async def warm(num_programs: int, num_sandboxes: int) -> tuple[float, float]:
    """Returns the seconds for all programs at once, and for a single one."""
    sample = Sample("code", f"```python\n{PROGRAM}\n```", ROW)
    async with CodeSandboxes(CodeConfig(num_sandboxes=num_sandboxes)) as source:
        await asyncio.sleep(1.0)  # generation takes longer
        started_s = time.perf_counter()
        (alone,) = await source.score([sample])
        alone_s = time.perf_counter() - started_s
        await asyncio.sleep(1.0)
        started_s = time.perf_counter()
        results = await source.score([sample] * num_programs)
        all_s = time.perf_counter() - started_s
    if any(scored.score != 1.0 for scored in [alone, *results]):
        raise RuntimeError(f"a program failed: {next(scored for scored in results if scored.score != 1.0)}")
    return all_s, alone_s


def cold(_: int) -> None:
    """Runs one program in a sandbox that is started for it."""
    with Sandbox(CodeConfig()) as sandbox:
        outcome = sandbox.run(PROGRAM, parse_cases(ROW))
    if not all(outcome.passed):
        raise RuntimeError(f"a program failed: {outcome}")


def bare(_: int) -> None:
    """Runs one program in an interpreter of its own for each test."""
    for text in ROW["inputs"]:
        subprocess.run([sys.executable, "-S", "-c", PROGRAM], input=text, text=True, capture_output=True, check=True)


async def hostile(num_sandboxes: int) -> None:
    """Scores each of the answers, as many at a time as there are sandboxes; prints the effect on this process."""
    async with CodeSandboxes(CodeConfig(num_sandboxes=num_sandboxes, memory_mb=4096)) as source:
        for name, (expected, response, row) in HOSTILE.items():
            start_bytes = peak_bytes = resident_bytes()
            longest_s = 0.0
            started_s = time.perf_counter()
            scoring = asyncio.ensure_future(source.score([Sample("code", response, row)] * num_sandboxes))
            while not scoring.done():
                slept_s = time.perf_counter()
                await asyncio.sleep(0.002)
                longest_s = max(longest_s, time.perf_counter() - slept_s - 0.002)
                peak_bytes = max(peak_bytes, resident_bytes())
            if any(scored.score != expected for scored in scoring.result()):
                raise RuntimeError(f"{name}: expected {expected}, got {scoring.result()}")
            elapsed_s = time.perf_counter() - started_s
            grown_mb = (peak_bytes - start_bytes) / 2**20
            row_mb = len(row) / 2**20
            print(
                f"  {name:36} {elapsed_s:5.1f} s; the event loop waits {1000 * longest_s:4.0f} ms at most;"
                f" this process grows by {grown_mb:5.1f} MiB, the row has {row_mb:4.1f}"
            )


def resident_bytes() -> int:
    """Returns the resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(run: Callable[[int], None], num_programs: int, num_threads: int) -> float:
    """Returns the seconds for that many programs."""
    with ThreadPoolExecutor(num_threads) as threads:
        started_s = time.perf_counter()
        list(threads.map(run, range(num_programs)))
        return time.perf_counter() - started_s


def main() -> None:
    """Prints the best of three, or the effect of hostile answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--sandboxes", type=int, default=2)
    parser.add_argument("--hostile", action="store_true")
    arguments = parser.parse_args()
    num_programs = arguments.programs
    num_sandboxes = arguments.sandboxes
    if arguments.hostile:
        print(f"{num_sandboxes} of each answer at a time")
        asyncio.run(hostile(num_sandboxes))
        return
    pools = [asyncio.run(warm(num_programs, num_sandboxes)) for _ in range(REPEATS)]
    lines = {
        "warm": min(all_s for all_s, _ in pools),
        "cold": min(timed(cold, num_programs, num_sandboxes) for _ in range(REPEATS)),
        "bare interpreter": min(timed(bare, num_programs, num_sandboxes) for _ in range(REPEATS)),
    }
    alone = {"warm": min(alone_s for _, alone_s in pools), "cold": min(timed(cold, 1, 1) for _ in range(REPEATS))}
    print(f"{num_programs} programs of {len(ROW['inputs'])} tests, {num_sandboxes} at a time")
    for name, seconds in lines.items():
        ratio = f"{lines['bare interpreter'] / seconds:.2f}x a bare interpreter"
        print(f"  {name:17} {num_programs / seconds:6.1f} programs/s  {ratio}")
    for name, seconds in alone.items():
        print(f"  one alone, {name:6} {1000 * seconds:6.1f} ms")


if __name__ == "__main__":
    main()
