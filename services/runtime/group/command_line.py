"""Parses the command line of a service before torch is imported; turns `python -m services.ROLE` into torchrun."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from services.runtime.group.machine import this_machine
from splitppo.config import Config, ConfigError, load_config
from splitppo.config.section import RoleName
from splitppo.config.threads import threads_of_rank
from splitppo.config.worker_digest import worker_digest
from splitppo.config_error import sentence_of
from splitppo.machine.cores import permitted_cores
from splitppo.machine.standard_streams import open_standard_streams
from splitppo.run_folder.end_reason import BAD_INPUT_EXIT

CLOSED_TORCHRUN = ("-m", "services.runtime.group.torchrun")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {' '.join(self.format_usage().split())}")


def parse(role_name: RoleName, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a service's command line (`arguments`, or sys.argv) and returns the options; ConfigError if wrong."""
    parser = _Parser(
        prog=f"services.{role_name}",
        description=f"The {role_name} service: under torchrun one rank of it, else all its ranks on this machine.",
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="replaces a value of the file")
    parser.add_argument(
        "--node-rank", type=int, metavar="N", help="which machine of its group this is, from 0; default: as Slurm says"
    )
    parser.add_argument("--check", action="store_true", help="validate configuration and models, and exit")
    parser.add_argument("--lifeline", action="store_true", help="exit at once when standard input ends")
    return parser.parse_intermixed_args(arguments)


def start_group_unless_rank(role_name: RoleName) -> None:
    """Replaces this process by torchrun, which starts a role's ranks; does nothing in a rank or with --check.

    torchrun starts `services.<role>.num_processes` ranks, divided by `nnodes`. For bad input this process exits with 2
    and one sentence.
    """
    open_standard_streams()
    if "RANK" in os.environ:
        return
    try:
        options = parse(role_name)
        if options.check:
            return
        config = load_config(options.config, options.overrides)
        torchrun = [*CLOSED_TORCHRUN, *_torchrun_flags(role_name, config, options.node_rank)]
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {sentence_of(error)}\n")
        sys.exit(BAD_INPUT_EXIT)
    service = config.services.of(role_name)
    num_threads = threads_of_rank(service, service.num_local_processes, permitted_cores())
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    service_arguments = ["-m", f"services.{role_name}", *sys.argv[1:]]
    os.execve(sys.executable, [sys.executable, *torchrun, *service_arguments], environment)  # noqa: S606


def _torchrun_flags(role_name: RoleName, config: Config, node_rank: int | None) -> list[str]:
    """Makes torchrun's flags: number of ranks; for several machines also machine 0's address and data to compare."""
    service = config.services.of(role_name)
    ranks = ["--nproc-per-node", str(service.num_local_processes)]
    if service.nnodes == 1:
        return ranks
    section = f"services.{role_name}"
    machine = this_machine(service, section, node_rank)
    details = {
        "section": section,
        "node_rank": machine.node_rank,
        "ifname": machine.ifname,
        "start_timeout_s": config.services.start_timeout_s,
        "num_processes": service.num_processes,
        "digest": worker_digest(config, role_name),
    }
    return [
        *("--nnodes", str(service.nnodes), *ranks),
        *("--rdzv-endpoint", f"{machine.master_address}:{service.master_port}"),
        *("--rdzv-conf", ",".join(f"{key}={value}" for key, value in details.items())),
    ]
