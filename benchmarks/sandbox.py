"""Programs per second in sandboxes: taken from those that wait, started when they are needed, and without any.

    python -m benchmarks.sandbox [--programs 200] [--sandboxes 2]

A program adds up numbers and has three tests on stdin. `warm` is a step's answers at once, by the pool; `cold` starts a
sandbox for each program and then runs it; `bare interpreter` is a process per test, without any protection. `one alone`
is a single program, which finds a sandbox waiting or does not.
"""

import argparse
import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rewards.code.bubblewrap import own_uid
from rewards.code.cases import parse_cases
from rewards.code.limits import Limits
from rewards.code.sandbox import Sandbox
from rewards.code.source import CodeSandboxes
from rewards.samples import Sample
from splitppo.config import CodeConfig

PROGRAM = "n = int(input())\nprint(sum(int(input()) for _ in range(n)))"
ROW = {"inputs": ["2\n1\n2\n", "1\n5\n", "3\n1\n1\n1\n"], "outputs": ["3", "5", "3"]}
REPEATS = 3


async def warm(num_programs: int, num_sandboxes: int) -> tuple[float, float]:
    """Seconds for all programs at once, and for one alone."""
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


def cold(number: int) -> None:
    """One program in a sandbox that is started for it."""
    with Sandbox(Limits(), own_uid(number)) as sandbox:
        outcome = sandbox.run(PROGRAM, parse_cases(ROW), threading.Event())
    if not all(outcome.passed):
        raise RuntimeError(f"a program failed: {outcome}")


def bare(_: int) -> None:
    """One program in an interpreter of its own per test."""
    for text in ROW["inputs"]:
        subprocess.run([sys.executable, "-S", "-c", PROGRAM], input=text, text=True, capture_output=True, check=True)


def timed(run: Callable[[int], None], num_programs: int, num_threads: int) -> float:
    """Seconds for that many programs."""
    with ThreadPoolExecutor(num_threads) as threads:
        started_s = time.perf_counter()
        list(threads.map(run, range(num_programs)))
        return time.perf_counter() - started_s


def main() -> None:
    """Prints the best of three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--sandboxes", type=int, default=2)
    arguments = parser.parse_args()
    num_programs, num_sandboxes = arguments.programs, arguments.sandboxes
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
