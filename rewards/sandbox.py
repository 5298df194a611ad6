"""Scoring processes: a call that hangs is killed, one that crashes takes its process along; both cost their sample."""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from ctypes import c_int
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from rewards import scoring_process
from rewards.scoring_process import UNKNOWN_POSITION, Call, Failure, Scored, ScorerSetup, timed_out
from splitppo.config import ConfigError

log = logging.getLogger(__name__)

_START_LIMIT_S = 120.0  # importing the scorers, a user's file included
_SLICE_S = 0.1  # a chunk ends after the call that runs then
_GRACE_S = 1.0  # on top of a call's time limit, before its process is killed; covers the slice
_CHUNKS_PER_WORKER = 4
_MAX_CHUNK_CALLS = 64
_MAX_POOL_RESTARTS = 3  # in a row, for one chunk


class Sandbox:
    """Runs scorers in worker processes, under a time limit per call.

    Calls travel in chunks. A process that hangs or dies says which call it was at, so the others are simply run again:
    a scorer may be called twice for a sample, and should have no side effects.

    Args:
        setup: the scorers and the time limit.
        num_workers: processes.
    """

    def __init__(self, setup: ScorerSetup, num_workers: int) -> None:
        self._setup = setup
        self._num_workers = num_workers
        self._context = multiprocessing.get_context("spawn")
        self._positions = self._context.RawArray(c_int, 2 * num_workers)
        self._pool: ProcessPool | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the processes and loads the scorers in one of them.

        Raises:
            ConfigError: a scorer cannot be loaded.
        """
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                error = await asyncio.wrap_future(self._running_pool().schedule(scoring_process.load_error))
        except TimeoutError:
            error = f"loading the reward functions took longer than {_START_LIMIT_S:g} s"
        except (BrokenExecutor, ProcessExpired):
            error = "a scoring process ended while it loaded the reward functions"
        if error:
            await self.close()
            raise ConfigError(error)

    async def close(self) -> None:
        """Ends the processes, also those in the middle of a call."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            await asyncio.to_thread(pool.join)

    async def run(self, calls: Sequence[Call]) -> list[Scored]:
        """Scores all calls; the result has one entry per call, in order.

        Raises:
            RuntimeError: scoring processes cannot be kept running, for a reason outside the scorers.
        """
        results: list[Scored | None] = [None] * len(calls)
        # A chunk holds a slot of the shared positions while it is under way.
        free_slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(len(self._positions)):
            free_slots.put_nowait(slot)

        async def run_all(indices: list[int]) -> None:
            while indices:
                slot = await free_slots.get()
                try:
                    done = await self._run_chunk([calls[index] for index in indices], slot)
                finally:
                    free_slots.put_nowait(slot)
                if done is None:  # nobody knows which call it was
                    await asyncio.gather(*(run_all([index]) for index in indices))
                    return
                for position, scored in done.items():
                    results[indices[position]] = scored
                indices = [index for index in indices if results[index] is None]

        size = min(_MAX_CHUNK_CALLS, math.ceil(len(calls) / (_CHUNKS_PER_WORKER * self._num_workers)) or 1)
        chunks = [list(range(start, min(start + size, len(calls)))) for start in range(0, len(calls), size)]
        await asyncio.gather(*(run_all(chunk) for chunk in chunks))
        return [scored for scored in results if scored is not None]

    async def _run_chunk(self, calls: list[Call], slot: int) -> dict[int, Scored] | None:
        """Results by position, of at least one call; None if one of several failed and it is not known which."""
        limit_s = self._setup.timeout_s
        self._positions[slot] = UNKNOWN_POSITION
        try:
            scored = await self._schedule(scoring_process.run_chunk, calls, slot, _SLICE_S, limit_s=limit_s + _GRACE_S)
            return dict(enumerate(scored))
        except TimeoutError:
            failed = timed_out(limit_s)
        except ProcessExpired as error:
            failed = Scored(0.0, failure=Failure.CRASH, message=f"ended its process with code {error.exitcode}")
        position = 0 if len(calls) == 1 else self._positions[slot]
        return None if position == UNKNOWN_POSITION else {position: failed}

    async def _schedule(self, function: Callable[..., Any], *arguments: Any, limit_s: float) -> Any:
        """Runs a function in a process; a pool that broke (a process died between two calls) is replaced."""
        for _ in range(_MAX_POOL_RESTARTS):
            pool = self._running_pool()
            try:
                return await asyncio.wrap_future(pool.schedule(function, args=arguments, timeout=limit_s))
            except (BrokenExecutor, RuntimeError) as error:
                if self._pool is pool:
                    log.warning("the scoring processes are started again: %s", error)
                    await self.close()
        raise RuntimeError("the scoring processes ended again and again")

    def _running_pool(self) -> ProcessPool:
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=self._num_workers,
                initializer=scoring_process.initialise,
                initargs=(self._setup, self._positions),
                context=self._context,
            )
        return self._pool
