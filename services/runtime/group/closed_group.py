"""Runs a torchrun group whose store, gloo and NCCL listen on one address or interface only.

The store of plain torchrun listens on every interface, open to anybody, whatever address it is given; gloo and NCCL
listen at the address of the machine's name. Here the store listens on one address (rendezvous.py), and gloo and NCCL
use one interface: `lo` on one machine, the interface between the machines on several (docs/adr/020-closed-groups.md).
"""

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from torch.distributed import DistError, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from services.runtime.failures.oom_kill import OomWatch
from services.runtime.group.forked_ranks import ForkedRank, start_forked
from services.runtime.group.rendezvous import BACKEND, LOOPBACK, CannotMeet, HasNotMet, Rendezvous, rendezvous
from splitppo.machine.children.ending import exit_status_of, how_it_ended
from splitppo.run_folder.end_reason import FirstEnd, write_first_end

_FAILED = 1
_BAD_INPUT = 2
# These loggers need many lines for what `report` says in one.
_TALKATIVE = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")


def run_closed_group(
    arguments: Sequence[str], ranks: Sequence[ForkedRank] = (), report_file: Path | None = None
) -> int:
    """Runs a torchrun group until all its ranks have ended.

    Args:
        arguments: of torchrun's command line.
        ranks: those of this machine, if they have been forked and wait; else torchrun starts them.
        report_file: takes how the rank that failed first has ended, as JSON.

    Returns:
        0 if every rank ended well; else the exit code of the rank that failed first (`culprit`). 128 + N if signal N
        ended that rank, or came to this process, which then drains the group.
    """
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    met: list[Rendezvous] = []
    memory = OomWatch()

    def meet(parameters: RendezvousParameters) -> Rendezvous:
        """Makes the group's rendezvous, and sets gloo and NCCL of the ranks to its network interface."""
        met.append(rendezvous(parameters))
        name = parameters.config.get("ifname", "lo")
        interface = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # else NCCL takes it for a prefix
        os.environ.update(interface)
        return met[0]

    told_to_end = start_forked(ranks) if ranks else set()
    rendezvous_handler_registry.register(BACKEND, meet)
    # Ranks report their failures themselves: torchrun needs no folder for logs, which would be left behind by a kill.
    ours = ("--rdzv-backend", BACKEND, "--rdzv-endpoint", LOOPBACK, "--log-dir", os.devnull)
    try:
        run.run(run.parse_args([*ours, "--max-restarts", "0", *arguments]))  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        first_end = _first_end(failed, told_to_end, ranks, memory)
        met[0].tell(first_end.rank, first_end.how)
        if report_file is not None:
            write_first_end(report_file, first_end)
        return report(first_end.rank, first_end.exit_code, first_end.how)
    except SignalException as ended:
        return exit_status_of(-int(ended.sigval))
    except (CannotMeet, HasNotMet) as error:
        sys.stderr.write(f"error: {error}\n")
        return _BAD_INPUT if isinstance(error, CannotMeet) else _FAILED
    except DistError:
        sys.stderr.write("error: the group's other machines have gone\n")
        return _FAILED
    return 0


def _first_end(
    failed: ChildFailedError, told_to_end: Set[int], ranks: Sequence[ForkedRank], memory: OomWatch
) -> FirstEnd:
    """Returns which rank ended first (`culprit`), and how.

    Ranks whose pids are in `told_to_end` are left out, as they ended because of another one, unless all of them are.
    """
    exit_codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
    by_themselves = [rank for rank, failure in failed.failures.items() if failure.pid not in told_to_end]
    rank = culprit({rank: exit_codes[rank] for rank in by_themselves or exit_codes})
    exit_code = exit_codes[rank]
    explanation = memory.explain(exit_code)  # empty unless memory had run out
    refusals = (forked_rank.refusal() for forked_rank in ranks)
    refusal = next(filter(None, refusals), "")  # only one rank prints why the input is refused
    return FirstEnd(rank, f"{how_it_ended(exit_code)}{explanation}", exit_code, refusal, is_oom_kill=bool(explanation))


def num_local_ranks(arguments: Sequence[str]) -> int:
    """Returns how many ranks torchrun starts on this machine with these arguments."""
    options = run.parse_args([*arguments])  # type: ignore[no-untyped-call]
    return int(run.determine_local_world_size(options.nproc_per_node))


def program_of_ranks(arguments: Sequence[str]) -> str | None:
    """Returns the module that torchrun runs as its ranks with these arguments.

    None if it runs a file, or starts a rank for each GPU: to count them starts CUDA, which no fork survives.
    """
    options = run.parse_args([*arguments])  # type: ignore[no-untyped-call]
    return str(options.training_script) if options.module and options.nproc_per_node.isdigit() else None


def culprit(exit_codes: Mapping[int, int]) -> int:
    """Guesses from the exit codes of ended ranks which rank failed first, and returns that rank.

    Other ranks exit because they miss a peer, or torchrun ends them by SIGTERM, which it knows of ranks that were
    forked. A rank that was ended by another signal, or has refused its input, is the first one.
    """

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        """Sorts, from the likeliest on: signals but SIGTERM, refused input, SIGTERM, other exit codes; by rank."""
        code = exit_codes[rank]
        is_other_signal = code < 0 and code != -signal.SIGTERM
        return not is_other_signal, code != _BAD_INPUT, code >= 0, rank

    return min(exit_codes, key=order)


def report(rank: int, exit_code: int, how: str) -> int:
    """Prints to stderr how a rank ended; returns the exit code with which torchrun should end, too.

    A rank that has refused its input has printed the reason itself. `exit_code` is negative for a signal, as in
    subprocess.
    """
    if exit_code != _BAD_INPUT:
        sys.stderr.write(f"error: rank {rank} {how}\n")
    return exit_status_of(exit_code)
