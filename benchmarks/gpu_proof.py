"""Shows on one GPU what only a GPU can show; docs/gpu-proof.md says how to run it and how to read its tables.

    python -m benchmarks.gpu_proof [--part 1 2 3 4] [--json FILE] [--tiny]

Part 1 runs tests/gpu and checks what the code relies on; part 2 times updates by size and mode, part 3 long rows; part
4 makes PPO runs with both groups on the GPU. No part takes more than nine minutes. What fails is said in one line, and
the rest goes on: cases run in a process of their own, and what follows a failure in a new one. --tiny does the same
with tiny shapes on a CPU, without tests/gpu.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib import metadata, util
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PART_LIMIT_S = 540.0
TITLES = {
    1: "What the code relies on",
    2: "Updates, two micro-batches of 16k tokens",
    3: "Long rows, and updates that repeat to the bit",
    4: "PPO runs, actor and critic on the same GPU",
}
# cuBLAS wants it before its first product for results that repeat.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64")
Result = dict[str, Any]


class Case(NamedTuple):
    """One measurement: a function of `benchmarks.gpu_cases`, its arguments, and environment variables that it needs."""

    name: str
    function: str
    arguments: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}


def cases_of(part: int, *, tiny: bool) -> list[Case]:
    """Returns the cases of a part, in the order in which they run."""
    if part == 1:
        names = ["ceilings", "attention", "fused AdamW"]
        return [Case(name, name) for name in ([] if tiny else ["tests/gpu"]) + names]
    return {2: _updates, 3: _long_rows, 4: _runs}[part](tiny=tiny)


def _updates(*, tiny: bool) -> list[Case]:
    checkpointing, cases = "gradient_checkpointing", []
    for size in ["tiny"] if tiny else ["0.5B", "1.5B", "7B"]:
        for mode in ("full", "lora"):
            switches: list[Mapping[str, Any]] = [{}, {checkpointing: True}]
            offload, bf16 = {checkpointing: True, "optimizer_offload": True}, {"optimizer_state_dtype": "bf16"}
            if mode == "full" and size in ("tiny", "1.5B"):
                switches += [offload, {**offload, "param_offload": True}, {checkpointing: True, **bf16}]
                switches += [{checkpointing: "selective"}, {checkpointing: True, "fp32_lm_head": False}]
            if mode == "full" and size in ("tiny", "7B"):
                switches.append({**offload, **bf16})
            for keys in switches:
                named = (key if value is True else f"{key} {value}" for key, value in keys.items())
                arguments = {"size": size, "mode": mode, "keys": keys}
                cases.append(Case(", ".join([f"{size} {mode}", *named]), "update", arguments))
    return cases


def _long_rows(*, tiny: bool) -> list[Case]:
    full, lora = ("tiny", "tiny") if tiny else ("1.5B", "7B")
    deterministic = {} if tiny else DETERMINISTIC
    cases = [
        Case(f"{full} full, deterministic algorithms", "repeat", {"size": full, "deterministic": True}, deterministic),
        Case(f"{full} full, default algorithms", "repeat", {"size": full, "deterministic": False}),
    ]
    for size, mode in ((full, "full"), (lora, "lora")):
        for tokens in (64, 128) if tiny else (4096, 8192, 16_384, 32_768, 65_536):
            arguments = {"size": size, "mode": mode, "tokens": tokens}
            cases.append(Case(f"{size} {mode}, {tokens} tokens", "row", arguments))
        arguments = {"size": size, "mode": mode, "tokens": 128 if tiny else 32_768, "checkpointing": "selective"}
        cases.append(Case(f"{size} {mode}, {arguments['tokens']} tokens, selective", "row", arguments))
    return cases


def _runs(*, tiny: bool) -> list[Case]:
    size, modes = ("tiny", ["lora"]) if tiny else ("0.5B", ["full", "lora"])
    return [Case(f"{size} {mode}", "run", {"size": size, "mode": mode}) for mode in modes]


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
    names, platforms = shlex.join(missing), " ".join(f"--platform {name}" for name in PLATFORMS)
    return (
        f"{sys.executable} lacks {', '.join(missing)}: on a machine with a network run `python3 -m pip download"
        f" --only-binary=:all: --python-version {python} {platforms} --dest wheels {names}`, bring the folder, and run"
        f" `{sys.executable} -m pip install --no-index --find-links wheels {names}`"
    )


class Measuring:
    """The process in which cases run: one for all, and a new one after a failure or for other environment variables."""

    def __init__(self, folder: Path, *, tiny: bool) -> None:
        self._arguments = [str(folder), *(["--tiny"] if tiny else [])]
        self._environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if tiny else {})
        self._own: Mapping[str, str] = {}
        self._process: Any = None
        self._errors = folder / "errors.txt"

    def result_of(self, case: Case, limit_s: float) -> Result:
        """Runs a case, for at most so many seconds; a process that dies is a failure of its case."""
        if case.environment != self._own:
            self.close()
        if self._process is None:
            self._start(case.environment)
        process, began_s, line = self._process, time.monotonic(), ""
        watch = threading.Timer(limit_s, self._kill)
        watch.daemon = True
        watch.start()
        with suppress(BrokenPipeError):
            print(json.dumps((case.function, case.arguments)), file=process.stdin, flush=True)
            line = process.stdout.readline()
        watch.cancel()
        if line.endswith("\n"):
            result: Result = json.loads(line)
        elif time.monotonic() - began_s >= limit_s:
            result = {"failed": "stopped, since the time of the part was over"}
        else:
            result = {"failed": self._cause(process)}
        if "failed" in result:  # its memory may still be held, and CUDA may answer no more
            self.close()
        return result

    def _start(self, own: Mapping[str, str]) -> None:
        self._own, environment = own, self._environment | own
        command = [sys.executable, "-m", "benchmarks.gpu_cases", *self._arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stderr=errors, start_new_session=True, **pipes
            )

    def _cause(self, process: Any) -> str:
        code = process.wait()
        said = [line.strip() for line in self._errors.read_text(errors="replace").splitlines() if line.strip()]
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"its process ended with {how}: {said[-1] if said else 'no message'}"

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # and a controller, whose groups end with it

    def close(self) -> None:
        """Ends the process, whatever it does."""
        if self._process is not None:
            self._kill()
            self._process.wait()
            self._process = None


def run_part(
    cases: Sequence[Case], limit_s: float, measuring: Measuring, report: Callable[[Case, Result], None]
) -> None:
    """Runs the cases of a part within its limit, and reports the result of each one."""
    ends_s = time.monotonic() + limit_s
    for case in cases:
        left_s = ends_s - time.monotonic()
        late = {"failed": f"not run, since the {limit_s:g} s of the part were over"}
        report(case, measuring.result_of(case, left_s) if left_s > 0 else late)


class Report:
    """The results so far: a JSON file that is written after each case, and a table for each part."""

    def __init__(self, file: Path, machine: Mapping[str, Any]) -> None:
        self._file, self._content = file, {"machine": machine, "parts": {}}
        file.parent.mkdir(parents=True, exist_ok=True)
        self.has_failed = False

    def add(self, part: int, case: Case, result: Result) -> None:
        """Adds the result of a case, and says it on stderr."""
        self.has_failed |= "failed" in result
        entry = {"name": case.name, "function": case.function, **result}
        self._content["parts"].setdefault(str(part), []).append(entry)
        self._file.write_text(json.dumps(self._content, indent=2) + "\n")
        found = result.get("values", {}).items()
        figures = [f"{name} {shown(value)}" for name, value in found if value is not None]
        states = [f"{state}: {result[state]}" for state in ("failed", "skipped") if state in result]
        print(f"part {part}, {case.name}: {', '.join([*figures, *states])}", file=sys.stderr, flush=True)

    def tables(self, part: int, seconds: float) -> str:
        """Returns the results of a part as Markdown: a table for each function, then what has no figures, and why."""
        entries = self._content["parts"].get(str(part), [])
        lines = [f"### {TITLES[part]} (part {part}, {seconds:.0f} s)", ""]
        figures = [entry for entry in entries if "values" in entry]
        for _, group in groupby(figures, key=lambda entry: entry["function"]):
            rows = list(group)
            columns = list(dict.fromkeys(name for row in rows for name in row["values"]))
            lines += [_line("case", *columns), "|---" * (1 + len(columns)) + "|"]
            lines += [_line(row["name"], *(shown(row["values"].get(name)) for name in columns)) for row in rows]
            lines.append("")
        for state in ("skipped", "failed"):
            lines += [f"* {entry['name']}: {state}: {entry[state]}" for entry in entries if state in entry]
        return "\n".join(lines)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def shown(value: Any) -> str:
    """Returns a figure as the tables show it: three digits, thousands with commas, and nothing for None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value).replace("|", "\\|")


def main() -> int:
    """Runs the parts that are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, nargs="+", choices=TITLES, default=list(TITLES), help="by default all")
    parser.add_argument("--json", type=Path, default=Path("runs/gpu-proof.json"), metavar="FILE", help="the results")
    parser.add_argument("--limit", type=float, default=PART_LIMIT_S, metavar="SECONDS", help="of each part")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU")
    options = parser.parse_args()
    tiny = options.tiny
    if missing := missing_packages():
        print(f"error: {how_to_carry(missing)}", file=sys.stderr)
        return 2
    import torch

    if not tiny and not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} finds no GPU here; --tiny runs on a CPU", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what runs is ended first
    scratch = tempfile.TemporaryDirectory("-gpu-proof", ignore_cleanup_errors=True)  # a group that ends may still write
    with scratch as folder, closing(Measuring(Path(folder), tiny=tiny)) as measuring:
        machine = measuring.result_of(Case("machine", "machine"), options.limit)
        if "failed" in machine:
            print(f"error: {machine['failed']}", file=sys.stderr)
            return 1
        report = Report(options.json, machine["values"])
        print("; ".join(f"{name} {shown(value)}" for name, value in machine["values"].items()), flush=True)
        for part in options.part:
            began_s = time.monotonic()
            run_part(cases_of(part, tiny=tiny), options.limit, measuring, partial(report.add, part))
            print(f"\n{report.tables(part, time.monotonic() - began_s)}", flush=True)
    return int(report.has_failed)


if __name__ == "__main__":
    sys.exit(main())
