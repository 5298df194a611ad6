"""The command line of a service, and how `python -m services.ROLE` becomes a group: read before torch is imported."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from splitppo.config import ConfigError, load_config
from splitppo.config.section import RoleName
from splitppo.config.threads import permitted_cores, threads_of_rank

BAD_INPUT_EXIT = 2
CLOSED_TORCHRUN = ("-m", "services.runtime.torchrun")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {' '.join(self.format_usage().split())}")


def parse(role_name: RoleName, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line, or `arguments`; ConfigError for one that is wrong."""
    parser = _Parser(
        prog=f"services.{role_name}",
        description=f"The {role_name} service: under torchrun one rank of it, else the whole group on this machine.",
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="replaces a value of the file")
    parser.add_argument("--check", action="store_true", help="validate the configuration and exit")
    parser.add_argument("--lifeline", action="store_true", help="exit at once when standard input ends")
    return parser.parse_intermixed_args(arguments)


def start_group_unless_rank(role_name: RoleName) -> None:
    """Returns in a rank, and for --check; any other process becomes torchrun, closed to the outside, for all ranks.

    The number of ranks is `services.<role>.num_processes`. Exits with 2 and one sentence for bad input.
    """
    if "RANK" in os.environ:
        return
    try:
        options = parse(role_name)
        if options.check:
            return
        service = load_config(options.config, options.overrides).services.of(role_name)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(BAD_INPUT_EXIT)
    num_threads = threads_of_rank(service, service.num_processes, permitted_cores())
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    torchrun = (sys.executable, *CLOSED_TORCHRUN, "--nproc-per-node", str(service.num_processes))
    os.execve(sys.executable, [*torchrun, "-m", f"services.{role_name}", *sys.argv[1:]], environment)  # noqa: S606
