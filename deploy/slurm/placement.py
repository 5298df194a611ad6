"""Checks a job against its recipe, and says where its groups are: `python -m deploy.slurm.placement NODE ...`.

Reads what deploy/slurm/splitppo.sbatch has exported; prints one override a line, for groups and controller. Where no
secrets are given it makes them, in the run folder. Exits with 2 and one sentence for what cannot be used.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.checks import check_recipe
from deploy.placement import PORTS, GroupPlace, overrides
from splitppo.config import ConfigError
from tools import certs

_DAYS = 90


def main(nodes: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Prints the overrides; 0, or 2 for a job that cannot run."""
    try:
        said = place(nodes, environment)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    sys.stdout.write("".join(f"{one}\n" for one in said))
    return 0


def place(nodes: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The overrides of a job on these nodes, in Slurm's order.

    Raises:
        ConfigError: numbers that are none or do not fit, a recipe with other groups.
        OSError, ValueError: secrets cannot be made.
    """
    counts = {role: _number(environment, f"{role.upper()}_NODES") for role in PORTS}
    if (wanted := sum(counts.values())) != len(nodes):
        names = " + ".join(f"{role.upper()}_NODES" for role in PORTS)
        added = " + ".join(map(str, counts.values()))
        raise ConfigError(f"the job has {len(nodes)} nodes, but {names} is {added} = {wanted}: sbatch --nodes {wanted}")
    num_gpus = _number(environment, "GPUS_PER_NODE") or None
    places, first = {}, 0
    for role, count in counts.items():
        if count:
            places[role] = GroupPlace(nodes[first], count, num_gpus)
            first += count
    run_dir = Path(environment["RUN_DIR"]).absolute()
    given = environment.get("SECRETS", "")
    secrets = Path(given).absolute() if given else run_dir / "secrets"
    said = overrides(str(run_dir), str(secrets), f"{secrets}/{{role}}", places)
    said += shlex.split(environment.get("OVERRIDES", ""))
    check_recipe(Path(environment["RECIPE"]), said, counts)
    if not given:
        certs.make(secrets, list(nodes), _DAYS, secrets / "spread", once=True)
    return said


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise ConfigError(f"{name} is {value!r}, expected a number")
    return int(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
