"""A torchrun group on one machine that nobody outside of it can reach.

Plain torchrun keeps its store on every interface, open to anybody, whatever address it is told; gloo and NCCL listen
where the machine's name points. Here the store listens on a socket that is bound to 127.0.0.1, and gloo and NCCL are
told to use `lo` (docs/adr/020-closed-groups.md).
"""

import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore, run  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

_LOOPBACK = "127.0.0.1"
_INTERFACE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
# What a step frees the next one needs again. By default glibc gives large blocks back to the kernel, which then has to
# clear pages for the same tensors; 32 MiB is the largest block that it can be told to keep.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
# oneDNN compiles a product anew for every number of rows. Packed rows come in ever new numbers, and by default 1024 of
# them would stay, in each of two caches; a pass needs about ten.
_COMPILED_PRODUCTS = {"LRU_CACHE_CAPACITY": "32", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
_BACKEND = "loopback"
_STORE_TIMEOUT = timedelta(seconds=60)
_BAD_INPUT = 2
_ENDED_BY_SIGNAL = 128  # the shell's convention: 128 + signal
# They tell in many lines what `report` says in one.
_TALKATIVE = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")


def run_closed_group(arguments: Sequence[str]) -> int:
    """Runs a group to its end; `arguments` are those of torchrun.

    Returns:
        0 where every rank ended well; else the exit code of the rank that failed first (`culprit`), 128 + N where
        signal N ended it, or has come to this process, which drains the group.
    """
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.update({**KEPT_MEMORY, **_COMPILED_PRODUCTS, **os.environ, **_INTERFACE})
    if _BACKEND not in rendezvous_handler_registry._registry:  # noqa: SLF001 # it offers no other question
        rendezvous_handler_registry.register(_BACKEND, LoopbackRendezvous)
    with tempfile.TemporaryDirectory(prefix="torchrun_") as error_files:
        ours = ("--rdzv-backend", _BACKEND, "--rdzv-endpoint", _LOOPBACK, "--log-dir", error_files)
        try:
            run.run(run.parse_args([*ours, "--max-restarts", "0", *arguments]))  # type: ignore[no-untyped-call]
        except ChildFailedError as failed:
            exit_codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            rank = culprit(exit_codes)
            return report(rank, exit_codes[rank])
        except SignalException as ended:
            return _ENDED_BY_SIGNAL + int(ended.sigval)
    return 0


def culprit(exit_codes: Mapping[int, int]) -> int:
    """Of ranks that were found ended at the same time, the one whose end the others have followed, if that can be told.

    The others exit when they miss a peer: what ended by a signal, or has refused its input, has done so by itself.
    """
    return min(exit_codes, key=lambda rank: (exit_codes[rank] >= 0, exit_codes[rank] != _BAD_INPUT, rank))


def report(rank: int, exit_code: int) -> int:
    """Says on stderr how a rank ended, unless it has said itself what is wrong with its input.

    Returns the exit code of its group; `exit_code` is negative for a signal, as subprocess has it.
    """
    if exit_code < 0:
        sys.stderr.write(f"error: rank {rank} was ended by {signal.Signals(-exit_code).name}\n")
        return _ENDED_BY_SIGNAL - exit_code
    if exit_code != _BAD_INPUT:
        sys.stderr.write(f"error: rank {rank} ended with exit code {exit_code}\n")
    return exit_code


class LoopbackRendezvous(RendezvousHandler):
    """One machine meets itself: torchrun's agent is number 0 of 1, in a store that listens on loopback alone."""

    use_agent_store = True  # the ranks are told where this store is, and open none of their own

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        # The store itself would bind every address; it takes a socket that listens already as it is.
        listening = socket.create_server((_LOOPBACK, 0), backlog=socket.SOMAXCONN)
        self._port = listening.getsockname()[1]
        self._store = TCPStore(
            _LOOPBACK,
            self._port,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening.detach(),
        )

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(_LOOPBACK, self._port)
        return RendezvousInfo(PrefixStore("torchrun", self._store), rank=0, world_size=1, bootstrap_store_info=where)

    def get_backend(self) -> str:
        return _BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else is there to be told."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
