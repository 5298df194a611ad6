"""What runs inside a scoring process: scorers that were loaded once, and chunks of calls.

The process is spawned, so this module and what it imports stay light.
"""

import asyncio
import ctypes
import inspect
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rewards.registry import CUSTOM, ComputeScore, load_custom_scorer, load_scorer
from rewards.samples import Failure, Sample, Scored

# The number of the call that a chunk is working on, shared with the controller; one entry per chunk under way.
Positions: TypeAlias = "ctypes.Array[ctypes.c_int]"
UNKNOWN_POSITION = -1
_PR_SET_PDEATHSIG = 1  # of Linux' prctl


@dataclass(frozen=True)
class ScorerSetup:
    """Which scorers a process has to load."""

    names: tuple[str, ...]  # every scorer that may be asked
    timeout_s: float  # of one call
    custom_path: Path | None = None  # where the scorer CUSTOM is
    custom_name: str = "compute_score"


class _Scorers:
    """State of the process: its scorers, loaded once."""

    def __init__(self, setup: ScorerSetup, positions: Positions) -> None:
        self.positions = positions
        self.timeout_s = setup.timeout_s
        self.runner = asyncio.Runner()
        self.by_name = {name: load_scorer(name) for name in setup.names if name != CUSTOM}
        if CUSTOM in setup.names and setup.custom_path is not None:
            self.by_name[CUSTOM] = load_custom_scorer(setup.custom_path, setup.custom_name)


_scorers: _Scorers | None = None
_load_error = ""


def initialise(setup: ScorerSetup, positions: Positions) -> None:
    """Start of the process: ties its life to the controller's and loads the scorers, outside any time limit."""
    global _scorers, _load_error
    # A session of its own: Ctrl-C and signals to the controller's process group let it finish the step.
    os.setsid()
    # The default action ends even a process that hangs in native code at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with_parent()
    try:
        _scorers = _Scorers(setup, positions)
    except ValueError as error:
        _load_error = str(error)


def load_error() -> str:
    """Why the scorers could not be loaded; empty if they could."""
    return _load_error


def run_chunk(samples: Sequence[Sample], slot: int, slice_s: float) -> list[Scored]:
    """Scores samples in order and stops early when `slice_s` is over, so a chunk lasts a slice and one call at most.

    Async scorers run all calls of the chunk together, each under its time limit. The number of the running call is kept
    in entry `slot` of the shared positions. Gives the results of the first samples, at least one.
    """
    assert _scorers is not None
    scorers = [_scorers.by_name[sample.scorer] for sample in samples]
    if any(map(_is_async, scorers)):
        _scorers.positions[slot] = UNKNOWN_POSITION
        return _scorers.runner.run(_run_together(samples, scorers, _scorers.timeout_s))
    results: list[Scored] = []
    ends = time.monotonic() + slice_s
    for position, (sample, scorer) in enumerate(zip(samples, scorers, strict=True)):
        _scorers.positions[slot] = position
        results.append(_run_one(sample, scorer, _scorers.timeout_s))
        if time.monotonic() > ends:
            break
    return results


def _run_one(sample: Sample, scorer: ComputeScore, timeout_s: float) -> Scored:
    started = time.monotonic()
    try:
        scored = _scored(_call(scorer, sample))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything: it costs its sample
        return _failed(error)
    return scored if time.monotonic() - started <= timeout_s else timed_out(timeout_s)


async def _run_together(samples: Sequence[Sample], scorers: Sequence[ComputeScore], timeout_s: float) -> list[Scored]:
    async def run(sample: Sample, scorer: ComputeScore) -> Scored:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                result = _call(scorer, sample)
                return _scored(await result if inspect.isawaitable(result) else result)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as in _run_one
            return timed_out(timeout_s) if limit.expired() else _failed(error)

    return await asyncio.gather(*map(run, samples, scorers))


def _call(scorer: ComputeScore, sample: Sample) -> Any | Awaitable[Any]:
    return scorer(
        data_source=sample.data_source,
        solution_str=sample.response,
        ground_truth=sample.ground_truth,
        extra_info=sample.extra_info,
    )


def _is_async(scorer: Any) -> bool:
    return inspect.iscoroutinefunction(scorer) or inspect.iscoroutinefunction(scorer.__call__)


def timed_out(timeout_s: float) -> Scored:
    """The result of a call that took too long."""
    return Scored(0.0, failure=Failure.TIMEOUT, message=f"took longer than {timeout_s:g} s")


def _failed(error: BaseException) -> Scored:
    return Scored(0.0, failure=Failure.ERROR, message=f"{type(error).__name__}: {error}")


def _scored(result: Any) -> Scored:
    """Checks what a scorer returned. TypeError or ValueError if it is no score."""
    fields = dict(result) if isinstance(result, Mapping) else {"score": result}
    if "score" not in fields:
        raise ValueError(f"the scorer's dict has no 'score', only {', '.join(map(str, fields)) or 'nothing'}")
    score = float(fields.pop("score"))
    if not math.isfinite(score):
        raise ValueError(f"the scorer returned {score}, which is not a finite number")
    return Scored(score, {str(key): _plain(value) for key, value in fields.items()})


def _plain(value: Any) -> Any:
    """A bool, number, string or None as it is (numpy's and torch's scalars as Python's), anything else as text."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _end_with_parent() -> None:
    """Makes this process die when the controller does, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        os._exit(1)
