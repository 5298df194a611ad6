"""Runs torchrun for a group that listens on loopback only, or on one interface of each of its machines.

    python -m services.runtime.group.torchrun --nproc-per-node 2 -m services.actor --config FILE [--lifeline]

takes torchrun's flags. Ranks of our services are forked from this process, which has imported for all of them; those of
another program are started. A controller has this process forked, too (template.py).

With `--lifeline` the group ends as soon as standard input ends. The ranks watch standard input too, but only once they
have started, and a rank that is stopped (SIGSTOP) cannot end itself. If this process is stopped itself, the kernel
wakes it when its parent ends; if it was forked, when standard input ends.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from services.runtime.group.rank_imports import import_for_ranks, module_of_ranks, start_again_unless_set
from splitppo.machine.children.ending import keep_exit_codes
from splitppo.machine.children.parent import signal_at_end_of_parent
from splitppo.machine.standard_streams import open_standard_streams

_POLL_INTERVAL_S = 0.01
_NO_PROCESS = 1
_LAUNCHER_HAS_GONE = 3
_LIFELINE = "--lifeline"


def run_torchrun(arguments: Sequence[str], *, forks: bool, report_file: Path | None = None) -> int:
    """Runs a group and returns the exit code; call it in a process with one thread.

    Args:
        arguments: of torchrun's command line.
        forks: its ranks are forked from this process, which has imported what they need.
        report_file: takes how the rank that failed first has ended.
    """
    from services.runtime.group.closed_group import num_local_ranks, run_closed_group
    from services.runtime.group.forked_ranks import fork_ranks

    has_lifeline = _LIFELINE in arguments
    try:
        ranks = fork_ranks(num_local_ranks(arguments), with_lifeline=has_lifeline) if forks else ()
        if has_lifeline:
            signal_at_end_of_parent(signal.SIGCONT)
            threading.Thread(target=_end_with_launcher, name="lifeline", daemon=True).start()
    except (OSError, RuntimeError) as error:  # RuntimeError is what Python says if there is no further thread
        what = "cannot start the processes and threads of the group"
        sys.stderr.write(f"error: {what}: {error}; does this machine limit them (`ulimit -u`, pids.max)?\n")
        return _NO_PROCESS
    return run_closed_group(arguments, ranks, report_file)


def _end_with_launcher() -> None:
    """Waits until standard input ends (the launcher has ended), then kills the ranks and ends this torchrun.

    Nothing is read from standard input, because the ranks wait for its end, too.
    """
    poll = select.poll()
    poll.register(0, 0)  # a hang-up is always reported
    while not any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll()):
        pass
    from splitppo.machine.children.tree import descendants, kill  # here, as the first thing is to wait

    # Repeated until no rank is left, because the main thread may be starting one.
    while ranks := descendants(os.getpid()):
        kill(ranks)
        time.sleep(_POLL_INTERVAL_S)
    os._exit(_LAUNCHER_HAS_GONE)


def main() -> int:
    """Imports what the ranks need, if they are ours, and runs the group of this process's command line."""
    open_standard_streams()
    if _LIFELINE in sys.argv:
        signal_at_end_of_parent(signal.SIGKILL)  # no rank is there yet
    keep_exit_codes()
    start_again_unless_set()
    import_for_ranks()
    from services.runtime.group.closed_group import program_of_ranks

    ranks = module_of_ranks(program_of_ranks(sys.argv[1:]))
    if ranks is not None:
        import_for_ranks([ranks])
    return run_torchrun(sys.argv[1:], forks=ranks is not None)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the clean-up of libraries, which takes seconds.
    os._exit(exit_code)
