"""The code of a scoring process: it loads the scoring functions once, then scores chunks of samples.

The controller and each scoring process import this module, so it imports nothing heavy.
"""

import asyncio
import ctypes
import inspect
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rewards.channel import Channel
from rewards.registry import ARGUMENTS, BATCH_ARGUMENTS, CUSTOM, TOKEN_SPANS, Scorer, load_custom_scorer, load_scorer
from rewards.returned import plain, score_and_fields
from rewards.samples import Failure, Sample, Scored
from rewards.scorers.symbolic import SYMBOLIC, SymbolicOutcome, begin_call, outcome_of_call
from rewards.token_scores import read_step_scores, read_token_scores
from splitppo.config_error import ConfigError
from splitppo.machine.children.parent import end_with

# In place of the number of the call that a process is working on: a call for several samples; no call yet.
UNKNOWN_POSITION = -1
NOT_BEGUN = -2

_SLICE_S = 0.1  # a chunk ends with the call that runs at this time


@dataclass(frozen=True)
class ScorerSetup:
    """The settings that a scoring process starts with: which scorers it loads, and the time limit of a call."""

    names: tuple[str, ...]  # every scorer that may be asked
    timeout_s: float  # seconds for one call
    custom: tuple[Path, str, Mapping[str, Any]] | None = None  # of the scorer CUSTOM, see `load_custom_scorer`


@dataclass(frozen=True)
class LoadReport:
    """The first message of a scoring process: whether its scorers were loaded, and how they are called.

    Attributes:
        error: the reason why the scorers cannot be loaded, or empty.
        is_batched, takes_token_spans: those of the scorer CUSTOM.
    """

    error: str = ""
    is_batched: bool = False
    takes_token_spans: bool = False


class Scorers:
    """The scoring functions of a scoring process, loaded once.

    Args:
        position: is set to the number of the current call; the controller reads it in shared memory.

    Raises:
        ConfigError: the user's function cannot be loaded.
    """

    def __init__(self, setup: ScorerSetup, position: ctypes.c_int) -> None:
        self._position = position
        self._timeout_s = setup.timeout_s
        self._runner = asyncio.Runner()
        self._by_name = {name: load_scorer(name) for name in setup.names if name != CUSTOM}
        if CUSTOM in setup.names and setup.custom is not None:
            self._by_name[CUSTOM] = load_custom_scorer(*setup.custom)

    def report(self) -> LoadReport:
        """Returns a `LoadReport` without an error."""
        own = self._by_name.get(CUSTOM)
        return LoadReport() if own is None else LoadReport("", own.is_batched, own.takes_token_spans)

    def score(self, samples: Sequence[Sample], *, may_give_up: bool) -> list[Scored] | Scored:
        """Scores samples of one scorer; returns results of at least the first one. The caller sends the others again.

        If a batched call failed, so that the sample that caused it is not known, returns one failed result for all.

        Calls run one after the other. No further call begins after a slice of time, so this method takes at most a
        slice and one call; nor after a symbolic comparison gave up. Without `may_give_up` no such comparison begins.
        The calls of an async scorer run together, each with its own time limit. A batched scorer gets all samples in
        one call.
        """
        scorer = self._by_name[samples[0].scorer]
        self._position.value = UNKNOWN_POSITION
        begin_call(may_give_up=may_give_up)
        if scorer.is_batched:
            return self._score_batch(samples, scorer)
        if scorer.is_async:
            return self._runner.run(_score_together(samples, scorer, self._timeout_s))
        results: list[Scored] = []
        ends = time.monotonic() + _SLICE_S
        for position, sample in enumerate(samples):
            self._position.value = position
            begin_call(may_give_up=may_give_up)
            results.append(self._score_one(sample, scorer))
            if time.monotonic() > ends or outcome_of_call() is SymbolicOutcome.GAVE_UP:
                break
        return results

    def _score_one(self, sample: Sample, scorer: Scorer) -> Scored:
        """Calls the scorer for a sample; an error or a call that took too long gives a failed result.

        The result says if a symbolic comparison gave up or was skipped in the call.
        """
        started = time.monotonic()
        try:
            scored = _scored(_call(scorer, sample), sample, scorer)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's function may raise anything
            return _failed(error, scorer)
        if time.monotonic() - started > self._timeout_s:
            return timed_out(self._timeout_s)
        outcome = outcome_of_call()
        return replace(scored, extra={**scored.extra, SYMBOLIC: outcome.value}) if outcome else scored

    def _score_batch(self, samples: Sequence[Sample], scorer: Scorer) -> list[Scored] | Scored:
        """Makes one call for all samples; if it fails, nobody knows by which, and one failed result stands for all."""
        try:
            returned = self._call_batch(samples, scorer)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as in _score_one
            return _failed(error, scorer)
        return [_checked(result, sample, scorer) for result, sample in zip(returned, samples, strict=True)]

    def _call_batch(self, samples: Sequence[Sample], scorer: Scorer) -> list[Any]:
        """Calls a batched scorer once for all samples; TypeError or ValueError without one result per sample."""
        rows = [_fields(scorer, sample) for sample in samples]
        columns = {BATCH_ARGUMENTS.get(name, name): [row[name] for row in rows] for name in rows[0]}
        returned = scorer.function(**columns, **scorer.kwargs)
        if inspect.isawaitable(returned):
            returned = self._runner.run(asyncio.wait_for(returned, self._timeout_s))
        results = list(returned)
        if len(results) != len(samples):
            raise ValueError(f"the scorer returned {len(results)} results for {len(samples)} responses")
        return results


def serve(channel: Channel, setup: ScorerSetup) -> None:
    """Loads the scorers, sends a `LoadReport`, then answers requests for scores until the controller has ended."""
    end_with(channel.controller_pid)
    own_pid = os.getpid()
    try:
        scorers = Scorers(setup, ctypes.c_int.from_buffer(channel.shared))
    except ConfigError as error:
        return channel.send(pickle.dumps(LoadReport(error=str(error))))
    channel.send(pickle.dumps(scorers.report()))
    while True:
        samples, may_give_up = pickle.loads(channel.receive())  # noqa: S301 - of the controller
        answer = scorers.score(samples, may_give_up=may_give_up)
        if os.getpid() != own_pid:  # the user's function has forked, and this is its child
            os._exit(1)
        channel.send(pickle.dumps(answer))


async def _score_together(samples: Sequence[Sample], scorer: Scorer, timeout_s: float) -> list[Scored]:
    """Runs all calls of an async scorer at the same time, each with its own time limit; a failed one fails alone."""

    async def score(sample: Sample) -> Scored:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return _scored(await _call(scorer, sample), sample, scorer)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as in _score_one
            return timed_out(timeout_s) if limit.expired() else _failed(error, scorer)

    return await asyncio.gather(*map(score, samples))


def _call(scorer: Scorer, sample: Sample) -> Any:
    return scorer.function(**_fields(scorer, sample), **scorer.kwargs)


def _fields(scorer: Scorer, sample: Sample) -> dict[str, Any]:
    """Returns the keyword arguments of a scoring function for one sample, without those that the configuration sets."""
    values = sample.data_source, sample.response, sample.ground_truth, sample.extra_info
    fields = dict(zip(ARGUMENTS, values, strict=True))
    return fields | {TOKEN_SPANS: sample.token_spans} if scorer.takes_token_spans else fields


def _checked(result: Any, sample: Sample, scorer: Scorer) -> Scored:
    """Reads the result of one sample of a batched call; a failed result if it cannot be read."""
    try:
        return _scored(result, sample, scorer)
    except Exception as error:  # noqa: BLE001 - a returned object may raise anything when it is read
        return _failed(error, scorer)


def timed_out(timeout_s: float) -> Scored:
    """Returns the result, with a failure, of a scorer's call that took longer than `timeout_s` seconds."""
    return Scored(0.0, failure=Failure.TIMEOUT, message=f"took longer than {timeout_s:g} s")


def _failed(error: BaseException, scorer: Scorer) -> Scored:
    return Scored(0.0, failure=Failure.ERROR, message=f"{type(error).__name__}: {error}{scorer.place_of(error)}")


def _scored(result: Any, sample: Sample, scorer: Scorer) -> Scored:
    """Converts the value that a scoring function returned to a `Scored`; TypeError or ValueError if it is no score."""
    score, fields = score_and_fields(result)
    num_tokens = len(sample.token_spans) if scorer.takes_token_spans else None
    return Scored(
        score,
        token_scores=read_token_scores(fields.pop("token_scores", None), num_tokens),
        step_scores=read_step_scores(fields.pop("step_scores", None), len(sample.response)),
        extra={str(key): plain(value) for key, value in fields.items()},
    )
