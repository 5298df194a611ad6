"""The template of worker groups: it imports everything once, and each start of a group is forked from it.

    python -m services.runtime.group.template --config FILE ROLE... CONTROL OWNER

    template ──► torchrun of the actor ──► its ranks      forks of one process: the code that they import is in
        │                                                 memory once, and none of them waits for it
        └──────► torchrun of the critic ──► its ranks

The template outlives the groups that are forked from it, and ends with the controller (CONTROL is its socket, OWNER
its pid). The template has one thread, opens no port and does not touch CUDA.
"""

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.runtime.group.rank_imports import import_for_ranks, module_of_ranks, start_again_unless_set
from splitppo.machine.children.forks import serve_forks
from splitppo.machine.children.parent import end_with
from splitppo.machine.children.title import set_process_title

log = logging.getLogger(__name__)


def main() -> None:
    """Imports what the ranks of these roles need, and forks torchruns until the controller has gone."""
    parser = argparse.ArgumentParser(prog="services.runtime.group.template", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="of the run; ps shows it until forks have names")
    parser.add_argument("roles", nargs="+", help="whose ranks are forked")
    parser.add_argument("control", type=int, help="descriptor of the controller's socket")
    parser.add_argument("owner", type=int, help="pid of the controller")
    options = parser.parse_args()
    end_with(options.owner)
    start_again_unless_set()
    import_for_ranks(filter(None, (module_of_ranks(f"services.{role}") for role in options.roles)))
    if (num_threads := len([*Path("/proc/self/task").iterdir()])) > 1:
        log.warning("the template of the groups has %d threads, expected 1: a fork of it may hang", num_threads)
    serve_forks(options.control, _run_torchrun)


def _run_torchrun(request: Mapping[str, Any]) -> int:
    """Runs a torchrun in a process that was forked for it; see `LocalGroup` in controller/workers/local_group.py."""
    from services.runtime.group.torchrun import run_torchrun

    os.environ.update(request["environment"])
    arguments = request["arguments"]
    set_process_title(f"services.runtime.group.torchrun {' '.join(arguments)}")
    return run_torchrun(arguments, forks=True, report_file=Path(file) if (file := request["report_file"]) else None)


if __name__ == "__main__":
    main()
    sys.exit(0)
