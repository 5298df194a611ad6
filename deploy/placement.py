"""Converts where each worker group of a deployment runs into overrides of the recipe's configuration keys.

This module needs the standard library only.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The port that each group listens on.
PORTS = {"actor": 7001, "critic": 7002, "reward": 7003, "rollout": 7004}


@dataclass(frozen=True)
class GroupPlace:
    """Where one worker group runs: its host name, its machines or pods, and their GPUs.

    Attributes:
        host: the host name at which the controller calls the group.
        num_nodes: the machines, or pods, of the group.
        num_gpus: GPUs of each of them, numbered from 0, with a rank on each; None: the group computes on the CPU, with
            as many ranks as the recipe has, or with one rank on each of several nodes.
        meeting: the host name of the first node, at which several nodes form a process group; empty: `host`.
    """

    host: str
    num_nodes: int = 1
    num_gpus: int | None = None
    meeting: str = ""


def overrides(
    run_dir: str, secrets: str, places: Mapping[str, GroupPlace], environment: Mapping[str, str], more: Sequence[str]
) -> list[str]:
    """Makes the `key.path=value` overrides of a deployment: run folder, mutual TLS with a token, place of each group.

    Worker groups and controller all get the same list.

    Args:
        run_dir: the run folder, on storage that all share.
        secrets: the folder of ca.pem, token, and certificate and key of each process.
        places: the places of the groups that exist.
        environment: the environment variables; the overrides in `OVERRIDES` come last and replace all others.
        more: further overrides of this kind of deployment (Compose, Kubernetes, Slurm).
    """
    placed = [
        f"run.dir={run_dir}",
        "services.launch=external",
        "services.security.tls=true",
        f"services.security.ca_file={secrets}/ca.pem",
        f'services.security.cert_file="{secrets}/{{role}}.pem"',
        f'services.security.key_file="{secrets}/{{role}}.key"',
        f"services.security.token_file={secrets}/token",
    ]
    for role, place in places.items():
        service = f"services.{role}"
        placed += [f"{service}.bind=0.0.0.0:{PORTS[role]}", f"{service}.address={place.host}:{PORTS[role]}"]
        if place.num_nodes > 1 or place.num_gpus is not None:
            devices = ",".join(map(str, range(place.num_gpus or 0)))
            num_processes = place.num_nodes * (place.num_gpus or 1)
            placed += [f"{service}.num_processes={num_processes}", f"{service}.devices=[{devices}]"]
        if place.num_nodes > 1:
            placed += [f"{service}.nnodes={place.num_nodes}", f"{service}.master_addr={place.meeting or place.host}"]
    return [*placed, *more, *shlex.split(environment.get("OVERRIDES", ""))]
