"""Runs scoring functions, built-in ones and the user's, in a pool of child processes.

A process whose call hangs is killed. A call that hangs or ends its process costs only its own sample.
"""

import asyncio
import logging
import math
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from ctypes import c_int
from dataclasses import replace
from itertools import chain
from typing import Self

from rewards.process import ProcessEnded, WorkerProcess
from rewards.registry import CUSTOM
from rewards.samples import Failure, Sample, Scored
from rewards.scorers.symbolic import SymbolicBudget
from rewards.scoring_process import NOT_BEGUN, UNKNOWN_POSITION, LoadReport, ScorerSetup, timed_out
from rewards.source import FailureLimit
from splitppo.config import ConfigError

log = logging.getLogger(__name__)

_START_LIMIT_S = 120.0  # importing the scorers, a user's file included
_GRACE_S = 1.0  # added to a call's time limit before its process is killed; covers the slice of a chunk
_CHUNKS_PER_WORKER = 4
_MAX_CHUNK_CALLS = 64
_MAX_STARTS = 3  # processes in a row that did not begin a chunk


class ScoringProcess(WorkerProcess):
    """A child process that calls scoring functions, with a number in shared memory that shows which call is running.

    Attributes:
        position: an integer in shared memory, written by the process. Its `value` is the number of the call that the
            process is working on, UNKNOWN_POSITION in a call for several samples, or NOT_BEGUN.
    """

    def __init__(self, setup: ScorerSetup, start_limit_s: float) -> None:
        super().__init__("rewards.scoring_process:serve", (setup,), pickle.loads, start_limit_s)
        self.position = c_int.from_buffer(self.shared)
        self.position.value = NOT_BEGUN

    async def run(self, samples: Sequence[Sample], limit_s: float, *, may_give_up: bool) -> list[Scored] | Scored:
        """Scores samples in this process; returns results of as many of the first samples as time allows, at least one.

        Starts the process first if it does not run.

        `limit_s` limits the calls, in seconds, and not the start. `Scorers.score` explains `may_give_up`, and a result
        that is no list.

        Raises:
            TimeoutError, ProcessEnded: the process has ended or was killed; `position` is the number of the running
                call.
            ChildProcessError: the scorers cannot be loaded any more.
        """
        self.position.value = NOT_BEGUN
        if not self.is_loaded and (error := (await self.load()).error):
            raise ChildProcessError(f"a scoring process cannot be started again: {error}")
        answer: list[Scored] | Scored = await self.ask((samples, may_give_up), limit_s)
        return answer


class ScoringProcesses:
    """A pool of processes that call scoring functions; an async context manager that starts and ends the processes.

    Samples are sent in chunks. If a process hangs or ends, its current call has failed, and the other calls of the
    chunk are made again. So a scorer may be called twice for a sample, and should have no side effects.

    Raises:
        ConfigError: on entering: the user's function cannot be loaded.
    """

    def __init__(self, setup: ScorerSetup, num_workers: int) -> None:
        self._setup = setup
        self._processes = [ScoringProcess(setup, _START_LIMIT_S) for _ in range(num_workers)]
        self._free: asyncio.Queue[ScoringProcess] = asyncio.Queue()
        self._loaded = LoadReport()
        self._is_open = True

    async def __aenter__(self) -> Self:
        """Loads the scoring functions in one process, then starts the other processes."""
        first, *others = self._processes
        try:
            self._loaded = await first.load()
            error = self._loaded.error
        except TimeoutError:
            error = f"loading the reward functions took longer than {_START_LIMIT_S:g} s"
        except ProcessEnded:
            error = "a scoring process ended while it loaded the reward functions"
        if error:
            await self.__aexit__()
            raise ConfigError(error)
        for process in others:
            await process.start()
        for process in self._processes:
            self._free.put_nowait(process)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends all scoring processes, also in the middle of a call."""
        self._is_open = False
        await asyncio.gather(*(process.end() for process in self._processes))

    async def score(self, samples: Sequence[Sample], limit: FailureLimit) -> list[Scored]:
        """Scores samples in the processes of the pool and returns one result per sample, in the same order.

        Raises:
            ChildProcessError: scoring processes do not stay alive, for a reason outside the scorers.
        """
        places: dict[str, list[int]] = defaultdict(list)
        for place, sample in enumerate(samples):
            places[sample.scorer].append(place)
        chunks = [chunk for scorer, own in places.items() for chunk in self._chunks(own, scorer)]
        light = await asyncio.to_thread(lambda: [self._as_it_travels(sample) for sample in samples])
        budget = SymbolicBudget(len(samples))
        scored = await asyncio.gather(
            *(self._score_chunk([light[place] for place in chunk], budget, limit) for chunk in chunks)
        )
        by_place = dict(zip(chain(*chunks), chain(*scored), strict=True))
        return [by_place[place] for place in range(len(samples))]

    def _as_it_travels(self, sample: Sample) -> Sample:
        """Returns a sample without the fields that its scoring function does not take, so that fewer bytes are sent."""
        takes_spans = sample.scorer == CUSTOM and self._loaded.takes_token_spans
        return replace(sample, prompt="", messages=(), token_spans=tuple(sample.token_spans) if takes_spans else ())

    def _chunks(self, places: Sequence[int], scorer: str) -> Iterator[Sequence[int]]:
        """Splits sample indices into chunks: one per process for a batched scorer, several per process for others."""
        if scorer == CUSTOM and self._loaded.is_batched:
            size = math.ceil(len(places) / len(self._processes))
        else:
            size = min(_MAX_CHUNK_CALLS, math.ceil(len(places) / (_CHUNKS_PER_WORKER * len(self._processes))))
        return (places[start : start + size] for start in range(0, len(places), size))

    async def _score_chunk(
        self, samples: Sequence[Sample], budget: SymbolicBudget, limit: FailureLimit
    ) -> list[Scored]:
        """Scores a chunk of samples: sends it to a free process, and again the samples that have no result yet.

        Each attempt gives at least one result. If a call for several samples failed, each sample is scored alone.
        """
        results: dict[int, Scored] = {}
        while left := [index for index in range(len(samples)) if index not in results]:
            process = await self._free.get()
            try:
                if limit.is_exceeded:
                    results |= dict.fromkeys(left, limit.not_scored())
                    break
                done = await self._run(process, [samples[index] for index in left], budget)
            finally:
                self._free.put_nowait(process)
            if done is None:
                alone = await asyncio.gather(*(self._score_chunk([samples[index]], budget, limit) for index in left))
                done = {position: scored for position, (scored,) in enumerate(alone)}
            scored = {left[position]: result for position, result in done.items()}
            limit.add([samples[index] for index in scored], scored.values())
            results |= scored
        return [results[index] for index in range(len(samples))]

    async def _run(
        self, process: ScoringProcess, samples: list[Sample], budget: SymbolicBudget
    ) -> dict[int, Scored] | None:
        """Scores samples in one process; returns results of the first ones, or of a failed call, by index in `samples`.

        Returns None if a call for several samples failed and which of them caused it is not known. A process that did
        not begin is replaced and asked again, because no scorer has seen the samples.
        """
        for _ in range(_MAX_STARTS):
            if not self._is_open:  # nobody waits for this call any more
                raise RuntimeError("the scoring processes have been ended")
            try:
                results = await process.run(samples, self._setup.timeout_s + _GRACE_S, may_give_up=budget.num_left > 0)
            except TimeoutError:
                failed = timed_out(self._setup.timeout_s)
            except ProcessEnded as error:
                failed = Scored(0.0, failure=Failure.CRASH, message=str(error))
            else:
                if isinstance(results, list):
                    budget.take(results)
                    return dict(enumerate(results))
                failed = results
            position = process.position.value
            if position == NOT_BEGUN:
                log.warning("a scoring process that did not begin its next call is replaced: it %s", failed.message)
            elif len(samples) == 1:
                return {0: failed}
            elif position == UNKNOWN_POSITION:
                log.warning("a call for %d responses failed, so each is scored alone: %s", len(samples), failed.message)
                return None
            else:
                return {position: failed}
        processes = f"{_MAX_STARTS} scoring processes in a row did not begin a call"
        raise ChildProcessError(f"{processes}; the last one {failed.message}")
