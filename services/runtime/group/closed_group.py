"""Runs a torchrun group whose store, gloo and NCCL listen on one address or interface only.

The store of plain torchrun listens on every interface, open to anybody, whatever address it is given; gloo and NCCL
listen at the address of the machine's name. Here the store listens on one address (rendezvous.py), and gloo and NCCL
use one interface: `lo` on one machine, the interface between the machines on several (docs/adr/020-closed-groups.md,
docs/adr/038-several-machines.md).
"""

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from torch.distributed import DistError, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from services.runtime.failures.oom_kill import OomWatch
from services.runtime.group.rendezvous import BACKEND, LOOPBACK, CannotMeet, HasNotMet, Rendezvous, rendezvous

# The next step needs the memory that a step frees. By default glibc gives large blocks back to the kernel, which then
# has to clear pages for the same tensors; 32 MiB is the largest block that glibc can be told to keep.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
# oneDNN compiles a product anew for every number of rows. Packed rows come in ever new numbers, and by default 1024 of
# them would stay, in each of two caches; a pass needs about ten.
_COMPILED_PRODUCTS = {"LRU_CACHE_CAPACITY": "32", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
_FAILED, _BAD_INPUT = 1, 2
_ENDED_BY_SIGNAL = 128  # the shell's convention: 128 + signal
# These loggers need many lines for what `report` says in one.
_TALKATIVE = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")


def run_closed_group(arguments: Sequence[str]) -> int:
    """Runs a torchrun group until all its ranks have ended; `arguments` are command-line arguments of torchrun.

    Returns:
        0 if every rank ended well; else the exit code of the rank that failed first (`culprit`). 128 + N if signal N
        ended that rank, or came to this process, which then drains the group.
    """
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    met: list[Rendezvous] = []
    memory = OomWatch()

    def meet(parameters: RendezvousParameters) -> Rendezvous:
        met.append(rendezvous(parameters))
        name = parameters.config.get("ifname", "lo")
        interface = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # else NCCL takes it for a prefix
        os.environ.update({**KEPT_MEMORY, **_COMPILED_PRODUCTS, **os.environ, **interface})
        return met[0]

    rendezvous_handler_registry.register(BACKEND, meet)
    # Ranks report their failures themselves: torchrun needs no folder for logs, which would be left behind by a kill.
    ours = ("--rdzv-backend", BACKEND, "--rdzv-endpoint", LOOPBACK, "--log-dir", os.devnull)
    try:
        run.run(run.parse_args([*ours, "--max-restarts", "0", *arguments]))  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        exit_codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        rank = culprit(exit_codes)
        why = memory.explain(exit_codes[rank])
        met[0].tell(rank, f"{_how_it_ended(exit_codes[rank])}{why}")
        return report(rank, exit_codes[rank], why)
    except SignalException as ended:
        return _ENDED_BY_SIGNAL + int(ended.sigval)
    except (CannotMeet, HasNotMet) as error:
        sys.stderr.write(f"error: {error}\n")
        return _BAD_INPUT if isinstance(error, CannotMeet) else _FAILED
    except DistError:
        sys.stderr.write("error: the group's other machines have gone\n")
        return _FAILED
    return 0


def culprit(exit_codes: Mapping[int, int]) -> int:
    """Guesses from the exit codes of ended ranks which rank failed first, and returns that rank.

    Other ranks exit because they miss a peer, or torchrun ends them by SIGTERM. A rank that was ended by another
    signal, or has refused its input, is the first one.
    """

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        code = exit_codes[rank]
        return code >= 0 or code == -signal.SIGTERM, code != _BAD_INPUT, code >= 0, rank

    return min(exit_codes, key=order)


def report(rank: int, exit_code: int, why: str = "") -> int:
    """Prints to stderr how and why a rank ended; returns the exit code with which torchrun should end, too.

    A rank that has refused its input has printed the reason itself. `exit_code` is negative for a signal, as in
    subprocess.
    """
    if exit_code != _BAD_INPUT:
        sys.stderr.write(f"error: rank {rank} {_how_it_ended(exit_code)}{why}\n")
    return _ENDED_BY_SIGNAL - exit_code if exit_code < 0 else exit_code


def _how_it_ended(exit_code: int) -> str:
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
