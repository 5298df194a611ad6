"""Checks a Slurm job against its recipe, and places its groups: `python -m deploy.slurm.placement NODE ...`.

The program reads the variables that deploy/slurm/splitppo.sbatch has exported, and prints one override on each line,
for groups and controller. If no secrets are given, the program makes them in the run folder. It ends with 2 and one
sentence if something cannot be used.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.checks import number
from deploy.placement import PORTS, GroupPlace, overrides
from deploy.preflight import check_recipe, exit_status
from splitppo.config import ConfigError
from tools import certs

_DAYS = 90


def main(nodes: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Prints the configuration overrides of a Slurm job; returns 0, or 2 for a job that cannot run."""
    return exit_status(lambda: "\n".join(place(nodes, environment)))


def place(nodes: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Assigns the job's nodes, in Slurm's order, to worker groups; returns the overrides of the configuration keys.

    Raises:
        Refused: a setting that should be a number is not.
        ConfigError: the numbers of nodes do not fit the job or the recipe, or the recipe has other groups.
        OSError, ValueError: secrets cannot be made.
    """
    counts = {role: number(environment, f"{role.upper()}_NODES") for role in PORTS}
    if (wanted := sum(counts.values())) != len(nodes):
        names = " + ".join(f"{role.upper()}_NODES" for role in PORTS)
        added = " + ".join(map(str, counts.values()))
        raise ConfigError(f"the job has {len(nodes)} nodes, but {names} is {added} = {wanted}: sbatch --nodes {wanted}")
    num_gpus = number(environment, "GPUS_PER_NODE") or None
    places = {}
    first = 0
    for role, count in counts.items():
        if count:
            places[role] = GroupPlace(nodes[first], count, num_gpus)
            first += count
    run_dir = Path(environment["RUN_DIR"]).absolute()
    given = environment.get("SECRETS", "")
    secrets = Path(given).absolute() if given else run_dir / "secrets"
    placed = overrides(str(run_dir), str(secrets), places, environment, ())
    check_recipe(Path(environment["RECIPE"]), placed, counts)
    if not given:
        certs.make(secrets, list(nodes), _DAYS, secrets / "spread", once=True)
    return placed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
