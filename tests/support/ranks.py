"""Ranks for tests of single modules: processes that form groups on gloo, without torchrun."""

from __future__ import annotations

import multiprocessing
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 30.0
_RESULT_TIMEOUT_S = 120.0

# (number of ranks, function, its arguments) -> what the function returns on each rank.
RunRanks = Callable[..., list[Any]]


@contextmanager
def rank_processes(max_ranks: int, folder: Path) -> Iterator[RunRanks]:
    """Starts processes, and gives the `with` block a function that runs a function on the ranks of a group of them.

    The function and its arguments are pickled. Each run is a group of its own, of up to `max_ranks` ranks.
    """
    with ProcessPoolExecutor(max_ranks, mp_context=multiprocessing.get_context("spawn")) as processes:

        def run(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
            store = folder / f"store-{secrets.token_hex(4)}"
            ranks = [
                processes.submit(_on_rank, rank, num_ranks, store, function, arguments) for rank in range(num_ranks)
            ]
            return [rank.result(_RESULT_TIMEOUT_S) for rank in ranks]

        try:
            yield run
        finally:
            for _ in range(max_ranks):  # at once: to leave in good order takes torch seconds
                processes.submit(os._exit, 0)


def _on_rank(rank: int, num_ranks: int, store: Path, function: Callable[..., Any], arguments: Any) -> Any:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timeout)
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()
