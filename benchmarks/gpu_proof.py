"""Shows on one GPU what only a GPU can show; docs/gpu-proof.md says how to run it and how to read its tables.

    python -m benchmarks.gpu_proof [--quick] [--only NAME ...] [--skip NAME ...] [--list] [--json FILE] [--tiny]

Runs the cases of benchmarks.gpu_list, all or those of eight minutes (--quick). They run in a process of their own,
each for a limited time; what fails is said in one line, the rest goes on, and what follows a failure runs in a new
process. The results so far are in two files, JSON and a page of Markdown. --tiny does the same with tiny shapes, on a
CPU where there is no GPU.

Exit status: 0; 1 if something failed or was not reached; 2 without a GPU, or if packages are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from contextlib import closing, suppress
from importlib import metadata, util
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from benchmarks.gpu_list import QUICK_LIMIT_S, Case, all_cases, chosen, quick_cases
from benchmarks.gpu_page import Report, Result, shown
from splitppo.machine.children.ending import end, signal_name

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64")
_LOG_BYTES = 20_000


def missing_packages() -> list[str]:
    """Returns the requirements of the controller, the workers and tests/gpu that this Python does not meet."""
    if util.find_spec("packaging") is None:
        return ["packaging"]
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for_tests = [line for line in extras["dev"] if line.startswith(("pytest>", "hypothesis>"))]

    def is_met(requirement: Requirement) -> bool:
        try:
            return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
        except metadata.PackageNotFoundError:
            return False

    wanted = map(Requirement, [*project["dependencies"], *extras["worker"], *for_tests])
    return [str(requirement) for requirement in wanted if not is_met(requirement)]


def how_to_carry(missing: Sequence[str]) -> str:
    """Returns a sentence that names missing packages, and how to bring them to a machine without a network."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    names = shlex.join(missing)
    platforms = " ".join(f"--platform {name}" for name in PLATFORMS)
    return (
        f"{sys.executable} lacks {', '.join(missing)}: on a machine with a network run `python3 -m pip download"
        f" --only-binary=:all: --python-version {python} {platforms} --dest wheels {names}`, bring the folder, and run"
        f" `{sys.executable} -m pip install --no-index --find-links wheels {names}`"
    )


class Measuring:
    """The process in which cases run: one for all, and a new one after a failure or for other environment variables.

    Args:
        command: what is started; it reads cases as lines of JSON, and prints the result of each one.
        log: the file of what the processes say on stderr.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = command
        self._log = log
        log.touch()
        self._environment: dict[str, str] = {}
        self._process: Any = None
        self._lines: SimpleQueue[str] = SimpleQueue()

    def result_of(self, case: Case, limit_s: float) -> Result:
        """Runs a case, for at most so many seconds; a process that dies or hangs is a failure of its case."""
        if case.environment != self._environment:
            self.close()
        if self._process is None:
            self._start(case)
        log_begins = self._log.stat().st_size
        with suppress(BrokenPipeError):
            print(json.dumps((case.function, case.arguments)), file=self._process.stdin, flush=True)
        try:
            line = self._lines.get(timeout=limit_s)
        except Empty:
            result: Result = {"failed": f"stopped after {limit_s:.3g} s, its limit"}
        else:
            result = json.loads(line) if line.endswith("\n") else {"failed": self._cause(log_begins)}
        if "failed" in result:
            self.close()  # its memory may still be held, and CUDA may answer no more
            result["log"] = self._said(log_begins)[-_LOG_BYTES:]
        return result

    def _start(self, case: Case) -> None:
        self._environment = dict(case.environment)
        self._lines = SimpleQueue()
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=os.environ | self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()

    def _cause(self, log_begins: int) -> str:
        code = self._process.wait()
        said = [line.strip() for line in self._said(log_begins).splitlines() if line.strip()]
        how = signal_name(-code) if code < 0 else f"exit status {code}"
        return f"its process ended with {how}: {said[-1] if said else 'no message'}"

    def _said(self, log_begins: int) -> str:
        return self._log.read_bytes()[log_begins:].decode(errors="replace")

    def close(self) -> None:
        """Ends the process, whatever it does; one that a driver holds is left behind."""
        if self._process is not None:
            end(self._process)  # and a controller, whose groups end with it
            self._process = None


def _read(pipe: Any, lines: SimpleQueue[str]) -> None:
    """Puts each line into the queue, and an empty one at the end."""
    for line in pipe:
        lines.put(line)
    lines.put("")


def run_cases(cases: Sequence[Case], limit_s: float, measuring: Measuring, report: Report) -> None:
    """Runs cases one after another until the limit is over, each for at most its own, and reports each result."""
    ends_s = time.monotonic() + limit_s
    for number, case in enumerate(cases, 1):
        began_s = time.monotonic()
        if began_s >= ends_s:
            print(f"the {limit_s:g} s are over; the page names the cases that were not reached", file=sys.stderr)
            break
        result = measuring.result_of(case, min(case.limit_s, ends_s - began_s))
        line = report.add(case, result, time.monotonic() - began_s)
        print(f"{number}/{len(cases)} {line}", file=sys.stderr, flush=True)


def main() -> int:
    """Runs the cases that are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the cases of eight minutes, the most important first")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these cases, groups or patterns")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="not these cases, groups or patterns")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and their limits")
    parser.add_argument("--json", type=Path, default=Path("runs/gpu-proof.json"), metavar="FILE", help="the results")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of all cases together; 540 with --quick")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on a CPU where there is no GPU")
    options = parser.parse_args()
    try:
        cases = chosen(quick_cases() if options.quick else all_cases(), options.only, options.skip)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{case.name:40} at most {case.limit_s:g} s" for case in cases))
        return 0
    if missing := missing_packages():
        print(f"error: {how_to_carry(missing)}", file=sys.stderr)
        return 2
    import torch

    if not options.tiny and not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} finds no GPU here; --tiny runs on a CPU", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what runs is ended first
    limit_s = options.limit or (QUICK_LIMIT_S if options.quick else float("inf"))
    with tempfile.TemporaryDirectory("-gpu-proof", ignore_cleanup_errors=True) as folder:  # groups that end still write
        command = [sys.executable, "-m", "benchmarks.gpu_cases", folder, *(["--tiny"] if options.tiny else [])]
        with closing(Measuring(command, Path(folder) / "log.txt")) as measuring:
            return _prove(cases, limit_s, measuring, options)


def _prove(cases: Sequence[Case], limit_s: float, measuring: Measuring, options: argparse.Namespace) -> int:
    """Runs the cases on the machine that the measuring process describes, and prints the page; returns the status."""
    machine = measuring.result_of(Case("machine", "machine"), 120.0)
    if "failed" in machine:
        print(f"error: {machine['failed']}", file=sys.stderr)
        return 1
    command = shlex.join(["python", "-m", "benchmarks.gpu_proof", *sys.argv[1:]])
    report = Report(options.json, command, machine["values"], cases, is_tiny=options.tiny)
    print("; ".join(f"{name} {shown(value)}" for name, value in machine["values"].items()), file=sys.stderr, flush=True)
    run_cases(cases, limit_s, measuring, report)
    print(report.page(), flush=True)
    print(f"results: {report.file}, {report.page_file}", file=sys.stderr)
    return int(report.has_failed)


if __name__ == "__main__":
    sys.exit(main())
