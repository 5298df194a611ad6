"""Scorers in processes of their own: the built-in functions and a user's.

A call that hangs is killed, one that crashes takes its process along; both cost their sample.
"""

import asyncio
import logging
import math
import multiprocessing
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor
from ctypes import c_int
from dataclasses import replace
from itertools import chain
from typing import Self

from pebble import ProcessExpired, ProcessPool

from rewards import scoring_process
from rewards.samples import Failure, Sample, Scored
from rewards.scoring_process import UNKNOWN_POSITION, BatchFailed, LoadReport, ScorerSetup, timed_out
from splitppo.config import ConfigError

log = logging.getLogger(__name__)

_START_LIMIT_S = 120.0  # importing the scorers, a user's file included
_SLICE_S = 0.1  # a chunk ends after the call that runs then
_GRACE_S = 1.0  # on top of a call's time limit, before its process is killed; covers the slice
_CHUNKS_PER_WORKER = 4
_MAX_CHUNK_CALLS = 64
_MAX_POOL_RESTARTS = 3  # in a row, for one chunk


class ScoringProcesses:
    """The source of scores that are functions; an async context manager that holds the processes.

    Samples travel in chunks. A process that hangs or dies says which call it was at, so the others are simply run
    again: a scorer may be called twice for a sample, and should have no side effects.

    Raises:
        ConfigError: on entering: a user's function cannot be loaded.
    """

    def __init__(self, setup: ScorerSetup, num_workers: int) -> None:
        self._setup = setup
        self._num_workers = num_workers
        self._context = multiprocessing.get_context("spawn")
        # A chunk holds a slot of the shared positions while it is under way.
        self._positions = self._context.RawArray(c_int, 2 * num_workers)
        self._free_slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(2 * num_workers):
            self._free_slots.put_nowait(slot)
        self._loaded = LoadReport()
        self._pool: ProcessPool | None = None

    async def __aenter__(self) -> Self:
        """Starts the processes and loads the scorers in one of them."""
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                self._loaded = await asyncio.wrap_future(self._running_pool().schedule(scoring_process.load_report))
            error = self._loaded.error
        except TimeoutError:
            error = f"loading the reward functions took longer than {_START_LIMIT_S:g} s"
        except (BrokenExecutor, ProcessExpired):
            error = "a scoring process ended while it loaded the reward functions"
        if error:
            await self._stop()
            raise ConfigError(error)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """Scores all samples, one result each.

        Raises:
            RuntimeError: scoring processes cannot be kept running, for a reason outside the scorers.
        """
        places: dict[str, list[int]] = defaultdict(list)
        for place, sample in enumerate(samples):
            places[sample.scorer].append(place)
        chunks = [chunk for scorer, own in places.items() for chunk in self._chunks(own, scorer)]
        light = await asyncio.to_thread(lambda: [self._as_it_travels(sample) for sample in samples])
        scored = await asyncio.gather(*(self._score_chunk([light[place] for place in chunk]) for chunk in chunks))
        by_place = dict(zip(chain(*chunks), chain(*scored), strict=True))
        return [by_place[place] for place in range(len(samples))]

    def _as_it_travels(self, sample: Sample) -> Sample:
        """With what its function is given, and no more."""
        takes_spans = sample.scorer in self._loaded.take_token_spans
        return replace(sample, prompt="", messages=(), token_spans=tuple(sample.token_spans) if takes_spans else ())

    def _chunks(self, places: Sequence[int], scorer: str) -> Iterator[Sequence[int]]:
        """Parts for the workers: one for each with a batched scorer, else several."""
        if scorer in self._loaded.batched:
            size = math.ceil(len(places) / self._num_workers)
        else:
            size = min(_MAX_CHUNK_CALLS, math.ceil(len(places) / (_CHUNKS_PER_WORKER * self._num_workers)))
        return (places[start : start + size] for start in range(0, len(places), size))

    async def _score_chunk(self, samples: Sequence[Sample]) -> list[Scored]:
        """Goes on until every sample has its result: each attempt gives at least one."""
        results: dict[int, Scored] = {}
        while left := [index for index in range(len(samples)) if index not in results]:
            done = await self._attempt([samples[index] for index in left])
            if done is None:  # nobody knows which call it was
                alone = await asyncio.gather(*(self._score_chunk([samples[index]]) for index in left))
                done = {position: scored for position, (scored,) in enumerate(alone)}
            results |= {left[position]: scored for position, scored in done.items()}
        return [results[index] for index in range(len(samples))]

    async def _attempt(self, samples: list[Sample]) -> dict[int, Scored] | None:
        """Results by position, of at least one sample; None if one of several failed and it is not known which."""
        slot = await self._free_slots.get()
        self._positions[slot] = UNKNOWN_POSITION
        try:
            return dict(enumerate(await self._schedule(samples, slot)))
        except BatchFailed as error:
            failed = Scored(0.0, failure=Failure.ERROR, message=str(error))
        except TimeoutError:
            failed = timed_out(self._setup.timeout_s)
        except ProcessExpired as error:
            failed = Scored(0.0, failure=Failure.CRASH, message=f"ended its process with code {error.exitcode}")
        finally:
            position = 0 if len(samples) == 1 else self._positions[slot]
            self._free_slots.put_nowait(slot)
        if position == UNKNOWN_POSITION:
            log.warning("a call for %d responses failed, each is scored alone: %s", len(samples), failed.message)
            return None
        return {position: failed}

    async def _schedule(self, samples: list[Sample], slot: int) -> list[Scored]:
        """Runs a chunk in a process; a pool that broke (a process died between two calls) is replaced."""
        limit_s = self._setup.timeout_s + _GRACE_S
        for _ in range(_MAX_POOL_RESTARTS):
            pool = self._running_pool()
            try:
                call = pool.schedule(scoring_process.run_chunk, args=(samples, slot, _SLICE_S), timeout=limit_s)
                return await asyncio.wrap_future(call)
            except (BrokenExecutor, RuntimeError) as error:
                if self._pool is pool:
                    log.warning("the scoring processes are started again: %s", error)
                    await self._stop()
        raise RuntimeError("the scoring processes ended again and again")

    async def _stop(self) -> None:
        """Ends the processes, also those in the middle of a call."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            await asyncio.to_thread(pool.join)

    def _running_pool(self) -> ProcessPool:
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=self._num_workers,
                initializer=scoring_process.initialise,
                initargs=(self._setup, self._positions),
                context=self._context,
            )
        return self._pool
