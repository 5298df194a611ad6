"""Checks rendered Kubernetes manifests before a cluster sees them.

    kubectl kustomize FOLDER | python -m deploy.k8s.check

The command ends with 0 and the batch plan, or with 2 and one sentence.
"""

import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy.checks import number
from deploy.k8s.entrypoint import common_overrides
from deploy.placement import PORTS
from deploy.preflight import check_recipe, exit_status
from splitppo.config import ConfigError

Manifest = dict[str, Any]
_PROJECT = Path(__file__).resolve().parents[2]
_IN_IMAGE = "/app/"
_GPU = "nvidia.com/gpu"


def main() -> int:
    """Checks the Kubernetes manifests on standard input, prints the batch plan or an error, and returns 0 or 2."""
    return exit_status(lambda: check(yaml.safe_load_all(sys.stdin)))


def check(manifests: Iterable[Manifest]) -> str:
    """Checks that Kubernetes manifests fit each other and the recipe; returns the batch plan of their run as text.

    Raises:
        ConfigError: the manifests disagree with each other, or with the recipe.
        Refused: a setting makes no sense.
    """
    objects = {(item["kind"], item["metadata"]["name"]): item for item in manifests if _is_object(item)}
    needed = [(kind, role) for role in PORTS for kind in ("Job", "Service")] + [("PersistentVolumeClaim", "storage")]
    if missing := [f"{kind}/{name}" for kind, name in needed if (kind, name) not in objects]:
        raise ConfigError(
            f"{missing[0]} is missing: expected what kubectl kustomize makes of an overlay of deploy/k8s/base"
        )
    settings = _generated(objects, "settings")
    jobs = {role: objects["Job", role]["spec"] for role in PORTS}
    num_nodes = {role: number(settings, f"{role.upper()}_NODES") for role in PORTS}
    for role, job in jobs.items():
        if bool(job.get("suspend")) != (num_nodes[role] == 0):
            state = "suspended" if job.get("suspend") else "not suspended"
            raise ConfigError(f"{role.upper()}_NODES is {num_nodes[role]}, but Job/{role} is {state}")
        if num_nodes[role]:
            _check_numbers(role, job, settings)
        _check_port(role, objects["Service", role])
        if certificate := objects.get(("Certificate", role)):
            _check_names(role, certificate["spec"].get("dnsNames", []))
    num_pods = sum(num_nodes.values()) + 1
    modes = objects["PersistentVolumeClaim", "storage"]["spec"]["accessModes"]
    if "ReadWriteMany" not in modes:
        raise ConfigError(
            f"the claim storage is {', '.join(modes)}, but {num_pods} pods share it: expected ReadWriteMany"
        )
    with tempfile.TemporaryDirectory() as folder:
        return check_recipe(_recipe(settings, objects, Path(folder)), common_overrides(settings), num_nodes)


def _is_object(manifest: object) -> bool:
    return isinstance(manifest, dict) and "kind" in manifest and "name" in (manifest.get("metadata") or {})


def _generated(objects: Mapping[tuple[str, str], Manifest], name: str) -> dict[str, str]:
    """Returns the content of a ConfigMap, to whose name kustomize has added a hash; {} if no such ConfigMap exists."""
    maps = (item for (kind, full), item in objects.items() if kind == "ConfigMap" and full.startswith(f"{name}-"))
    return next((dict(item["data"]) for item in maps), {})


def _check_numbers(role: str, job: Manifest, settings: Mapping[str, str]) -> None:
    """Checks that a Job has as many pods and GPUs as the settings ROLE_NODES and ROLE_GPUS say; else ConfigError."""
    (container,) = job["template"]["spec"]["containers"]
    limits = container.get("resources", {}).get("limits", {})
    numbers = [("NODES", field, job[field]) for field in ("completions", "parallelism")]
    for what, field, actual in [*numbers, ("GPUS", _GPU, limits.get(_GPU, 0))]:
        name = f"{role.upper()}_{what}"
        if int(actual) != number(settings, name):
            raise ConfigError(f"{name} is {settings[name]}, but {field} of Job/{role} is {actual}")


def _check_port(role: str, service: Manifest) -> None:
    ports = [port["port"] for port in service["spec"]["ports"]]
    if ports != [PORTS[role]]:
        raise ConfigError(f"Service/{role} has port {', '.join(map(str, ports))}, expected {PORTS[role]}")


def _check_names(role: str, names: list[str]) -> None:
    """Checks that a certificate is for the names by which its group is called; else ConfigError."""
    for host, caller in ((role, "the controller calls"), ("localhost", "probes call")):
        if host not in names:
            raise ConfigError(
                f"dnsNames of Certificate/{role} are {', '.join(names)}, expected {host} too: {caller} it"
            )


def _recipe(settings: Mapping[str, str], objects: Mapping[tuple[str, str], Manifest], folder: Path) -> Path:
    """Returns the path of the recipe: a file made from the ConfigMap, or the checkout's file for a path under /app."""
    path = settings.get("RECIPE", "")
    if path.startswith(_IN_IMAGE):
        return _PROJECT / path.removeprefix(_IN_IMAGE)
    files = _generated(objects, "recipe")
    name = path.removeprefix("/recipe/")
    if name not in files:
        raise ConfigError(f"RECIPE is {path!r}, but the ConfigMap recipe has {', '.join(files) or 'no files'}")
    (folder / "recipe.yaml").write_text(files[name])
    return folder / "recipe.yaml"


if __name__ == "__main__":
    sys.exit(main())
