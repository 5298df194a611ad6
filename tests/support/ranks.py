"""Ranks for tests of single modules: processes that form groups on gloo, or on NCCL, without torchrun."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug

# A process that has imported these is copied for each rank; it has run nothing, so it has no threads.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.support.rank_imports"])
_TIMEOUT = timedelta(seconds=60)
_RESULT_TIMEOUT_S = 600.0

# (number of ranks, function, its arguments) -> what the function returns on each rank.
RunRanks = Callable[..., list[Any]]


@contextmanager
def rank_processes(max_ranks: int, *, on_gpus: bool = False) -> Iterator[RunRanks]:
    """Starts processes, and gives the `with` block a function that runs a function on the ranks of a group of them.

    The function and its arguments are pickled. Each run is a group of its own, of up to `max_ranks` ranks. A process
    has the same rank in all of them: torch caches the rows of a rank by the shape of the mesh alone. With `on_gpus`
    each rank has a GPU of its own, the groups are on NCCL, too, and the GPUs may be pretended.
    """
    store, numbers = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), itertools.count()
    with ExitStack() as stack:
        processes = [stack.enter_context(ProcessPoolExecutor(1, mp_context=PROCESSES)) for _ in range(max_ranks)]

        def run(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
            group = store.port, f"group-{next(numbers)}", num_ranks, on_gpus
            ranks = [
                process.submit(_on_rank, rank, *group, function, arguments)
                for rank, process in enumerate(processes[:num_ranks])
            ]
            return [rank.result(_RESULT_TIMEOUT_S) for rank in ranks]

        try:
            yield run
        finally:
            for process in processes:  # at once: to leave in good order takes torch seconds
                process.submit(os._exit, 0)


def _on_rank(
    rank: int, port: int, name: str, num_ranks: int, on_gpus: bool, function: Callable[..., Any], arguments: Any
) -> Any:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if on_gpus else None
    if device is not None:
        torch.cuda.set_device(device)
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT))
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT, device_id=device)
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()  # it holds meshes of this group, which are equal to those of the next one
