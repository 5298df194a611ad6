"""What runs inside a scoring process: scorers that were loaded once, and chunks of calls.

The process is spawned, so this module and what it imports stay light.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeAlias

from rewards.registry import ComputeScore, load_custom_scorer, load_scorer, scorer_name

# The number of the call that a chunk is working on, shared with the controller; one entry per chunk under way.
Positions: TypeAlias = "ctypes.Array[ctypes.c_int]"
UNKNOWN_POSITION = -1


class Failure(Enum):
    """Why a call gave no score."""

    ERROR = "error"  # it raised, or returned something that is no score
    TIMEOUT = "timeout"  # it took longer than its time limit
    CRASH = "crash"  # it ended its process


@dataclass(frozen=True)
class Call:
    """One call of a scorer, as `compute_score` takes it."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Any = None


@dataclass(frozen=True)
class Scored:
    """What a call gave: score and the other fields of its dict; after a failure 0, and a sentence."""

    score: float
    extra: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    message: str = ""


@dataclass(frozen=True)
class ScorerSetup:
    """Which scorers a process has to load.

    Attributes:
        data_sources: every source whose calls may come; the built-in scorers of these are loaded.
        custom_path, custom_name: a user's function, which then judges all sources.
        timeout_s: time limit of one call.
    """

    data_sources: tuple[str, ...]
    timeout_s: float
    custom_path: Path | None = None
    custom_name: str = "compute_score"


class _Scorers:
    """State of the process."""

    def __init__(self, setup: ScorerSetup, positions: Positions) -> None:
        self.positions = positions
        self.timeout_s = setup.timeout_s
        self.runner = asyncio.Runner()
        self._by_name: dict[str, ComputeScore] = {}
        self._custom: ComputeScore | None = None
        if setup.custom_path is not None:
            self._custom = load_custom_scorer(setup.custom_path, setup.custom_name)
        else:
            for data_source in setup.data_sources:
                self.of(data_source)

    def of(self, data_source: str) -> ComputeScore:
        if self._custom is not None:
            return self._custom
        name = scorer_name(data_source)
        if name not in self._by_name:
            self._by_name[name] = load_scorer(name)
        return self._by_name[name]


_scorers: _Scorers | None = None
_load_error = ""


def initialise(setup: ScorerSetup, positions: Positions) -> None:
    """Start of the process: ties its life to the controller's and loads the scorers, outside any time limit."""
    # A session of its own: Ctrl-C and signals to the controller's process group let it finish the step.
    os.setsid()
    global _scorers, _load_error
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


def run_chunk(calls: Sequence[Call], slot: int, slice_s: float) -> list[Scored]:
    """Scores calls in order and stops early when `slice_s` is over, so a chunk lasts a slice and one call at most.

    Async scorers run all calls of the chunk together, each under its time limit.

    Args:
        calls: at least one.
        slot: entry of the shared positions where the number of the running call is kept.
        slice_s: seconds.

    Returns:
        Results of the first calls, at least one.
    """
    assert _scorers is not None
    scorers = [_scorers.of(call.data_source) for call in calls]
    if any(_is_async(scorer) for scorer in scorers):
        _scorers.positions[slot] = UNKNOWN_POSITION
        return _scorers.runner.run(_run_together(calls, scorers, _scorers.timeout_s))
    results: list[Scored] = []
    ends = time.monotonic() + slice_s
    for position, (call, scorer) in enumerate(zip(calls, scorers, strict=True)):
        _scorers.positions[slot] = position
        results.append(_run_one(call, scorer, _scorers.timeout_s))
        if time.monotonic() > ends:
            break
    return results


def _run_one(call: Call, scorer: ComputeScore, timeout_s: float) -> Scored:
    started = time.monotonic()
    try:
        scored = _scored(_apply(scorer, call))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything: it costs its sample
        return _failed(error)
    return scored if time.monotonic() - started <= timeout_s else timed_out(timeout_s)


async def _run_together(calls: Sequence[Call], scorers: Sequence[ComputeScore], timeout_s: float) -> list[Scored]:
    async def run(call: Call, scorer: ComputeScore) -> Scored:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                result = _apply(scorer, call)
                return _scored(await result if inspect.isawaitable(result) else result)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as in _run_one
            if limit.expired():
                return timed_out(timeout_s)
            return _failed(error)

    return await asyncio.gather(*(run(call, scorer) for call, scorer in zip(calls, scorers, strict=True)))


def _apply(scorer: ComputeScore, call: Call) -> Any | Awaitable[Any]:
    return scorer(
        data_source=call.data_source,
        solution_str=call.solution_str,
        ground_truth=call.ground_truth,
        extra_info=call.extra_info,
    )


def _is_async(scorer: ComputeScore) -> bool:
    return inspect.iscoroutinefunction(scorer) or inspect.iscoroutinefunction(getattr(scorer, "__call__", None))  # noqa: B004


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
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent.pid:
            os._exit(1)
    else:

        def watch() -> None:
            wait([parent.sentinel])
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
