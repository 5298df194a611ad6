"""What runs inside a scoring process: scorers that were loaded once, and chunks of calls.

The process is spawned, so this module and what it imports stay light.
"""

import asyncio
import ctypes
import inspect
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from rewards.registry import ARGUMENTS, BATCH_ARGUMENTS, CUSTOM, TOKEN_SPANS, Scorer, load_custom_scorer, load_scorer
from rewards.samples import Failure, Sample, Scored
from rewards.token_scores import finite_number, read_step_scores, read_token_scores

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
    custom_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadReport:
    """How loading the scorers went: an error, or which of them take many samples in one call, which the tokens."""

    error: str = ""
    batched: frozenset[str] = frozenset()
    take_token_spans: frozenset[str] = frozenset()


class BatchFailed(Exception):
    """A call for several samples failed, and nobody knows because of which."""


class _Scorers:
    """State of the process: its scorers, loaded once."""

    def __init__(self, setup: ScorerSetup, positions: Positions) -> None:
        self.positions = positions
        self.timeout_s = setup.timeout_s
        self.runner = asyncio.Runner()
        self.by_name = {name: load_scorer(name) for name in setup.names if name != CUSTOM}
        if CUSTOM in setup.names and setup.custom_path is not None:
            self.by_name[CUSTOM] = load_custom_scorer(setup.custom_path, setup.custom_name, setup.custom_kwargs)


_scorers: _Scorers | None = None
_report = LoadReport()


def initialise(setup: ScorerSetup, positions: Positions) -> None:
    """Start of the process: ties its life to the controller's and loads the scorers, outside any time limit."""
    global _scorers, _report
    # A session of its own: Ctrl-C and signals to the controller's process group let it finish the step.
    os.setsid()
    # The default action ends even a process that hangs in native code at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with_parent()
    try:
        _scorers = _Scorers(setup, positions)
        scorers = _scorers.by_name.items()
        _report = LoadReport(
            batched=frozenset(name for name, one in scorers if one.is_batched),
            take_token_spans=frozenset(name for name, one in scorers if one.takes_token_spans),
        )
    except ValueError as error:
        _report = LoadReport(error=str(error))


def load_report() -> LoadReport:
    """How loading the scorers went."""
    return _report


def run_chunk(samples: Sequence[Sample], slot: int, slice_s: float) -> list[Scored]:
    """Scores samples of one scorer, in order; gives the results of the first ones, at least one.

    One call after the other, until `slice_s` is over, so a chunk lasts a slice and one call at most. The number of the
    running call is kept in entry `slot` of the shared positions. Calls of an async scorer run together, each under its
    time limit. A batched scorer has all samples in one call.

    Raises:
        BatchFailed: a call for several samples gave no scores; for one it is a result like any other.
    """
    assert _scorers is not None
    scorer, timeout_s = _scorers.by_name[samples[0].scorer], _scorers.timeout_s
    if scorer.is_batched:
        return _run_batch(samples, scorer)
    if scorer.is_async:
        return _scorers.runner.run(_run_together(samples, scorer, timeout_s))
    results: list[Scored] = []
    ends = time.monotonic() + slice_s
    for position, sample in enumerate(samples):
        _scorers.positions[slot] = position
        results.append(_run_one(sample, scorer, timeout_s))
        if time.monotonic() > ends:
            break
    return results


def _run_one(sample: Sample, scorer: Scorer, timeout_s: float) -> Scored:
    started = time.monotonic()
    try:
        scored = _scored(_call(scorer, sample), sample, scorer)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything: it costs its sample
        return _failed(error)
    return scored if time.monotonic() - started <= timeout_s else timed_out(timeout_s)


async def _run_together(samples: Sequence[Sample], scorer: Scorer, timeout_s: float) -> list[Scored]:
    async def run(sample: Sample) -> Scored:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return _scored(await _call(scorer, sample), sample, scorer)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as in _run_one
            return timed_out(timeout_s) if limit.expired() else _failed(error)

    return await asyncio.gather(*map(run, samples))


def _run_batch(samples: Sequence[Sample], scorer: Scorer) -> list[Scored]:
    try:
        returned = _call_batch(scorer, samples)
    except (Exception, SystemExit) as error:
        if len(samples) > 1:
            raise BatchFailed(f"{type(error).__name__}: {error}") from error
        return [_failed(error)]
    return [_checked(result, sample, scorer) for result, sample in zip(returned, samples, strict=True)]


def _call_batch(scorer: Scorer, samples: Sequence[Sample]) -> list[Any]:
    """What a batched scorer returns: as many results as samples. TypeError or ValueError if it is something else."""
    assert _scorers is not None
    columns = zip(*(_fields(sample) for sample in samples), strict=True)
    asked_for = {TOKEN_SPANS: [sample.token_spans for sample in samples]} if scorer.takes_token_spans else {}
    arguments = dict(zip(BATCH_ARGUMENTS, map(list, columns), strict=True)) | asked_for
    returned = scorer.function(**arguments, **scorer.kwargs)
    if inspect.isawaitable(returned):
        returned = _scorers.runner.run(_awaited(returned, _scorers.timeout_s))
    results = list(returned)
    if len(results) != len(samples):
        raise ValueError(f"the scorer returned {len(results)} results for {len(samples)} responses")
    return results


async def _awaited(returned: Awaitable[Any], timeout_s: float) -> Any:
    async with asyncio.timeout(timeout_s):
        return await returned


def _call(scorer: Scorer, sample: Sample) -> Any:
    asked_for = {TOKEN_SPANS: sample.token_spans} if scorer.takes_token_spans else {}
    return scorer.function(**dict(zip(ARGUMENTS, _fields(sample), strict=True)), **asked_for, **scorer.kwargs)


def _fields(sample: Sample) -> tuple[Any, ...]:
    """In the order of ARGUMENTS."""
    return sample.data_source, sample.response, sample.ground_truth, sample.extra_info


def _checked(result: Any, sample: Sample, scorer: Scorer) -> Scored:
    try:
        return _scored(result, sample, scorer)
    except Exception as error:  # noqa: BLE001 - as in _run_one: what it returned may raise anything when it is read
        return _failed(error)


def timed_out(timeout_s: float) -> Scored:
    """The result of a call that took too long."""
    return Scored(0.0, failure=Failure.TIMEOUT, message=f"took longer than {timeout_s:g} s")


def _failed(error: BaseException) -> Scored:
    return Scored(0.0, failure=Failure.ERROR, message=f"{type(error).__name__}: {error}")


def _scored(result: Any, sample: Sample, scorer: Scorer) -> Scored:
    """Checks what a scorer returned. TypeError or ValueError if it is no score."""
    fields = dict(result) if isinstance(result, Mapping) else {"score": result}
    if "score" not in fields:
        raise ValueError(f"the scorer's dict has no 'score', only {', '.join(map(str, fields)) or 'nothing'}")
    score = finite_number(fields.pop("score"), "a number, or a dict with 'score'")
    num_tokens = len(sample.token_spans) if scorer.takes_token_spans else None
    return Scored(
        score,
        token_scores=read_token_scores(fields.pop("token_scores", None), num_tokens),
        step_scores=read_step_scores(fields.pop("step_scores", None), len(sample.response)),
        extra={str(key): _plain(value) for key, value in fields.items()},
    )


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
