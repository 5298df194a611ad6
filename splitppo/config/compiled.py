"""Says which models of a group have compiled layers (`compile`), and checks that they can be compiled here."""

import os
import shutil

from splitppo.config.schema import Config
from splitppo.config.section import RoleName
from splitppo.config_error import ConfigError


def compile_keys(config: Config, role: RoleName) -> list[str]:
    """Returns the keys, such as actor.compile, by which models that a role's group holds get compiled layers."""
    sections = {
        "actor": role == "actor" or config.reference_host == role,
        "critic": role == "critic",
        "reward_model": config.reward_model_host == role,
        "teacher": config.teacher_host == role,
    }
    return [f"{name}.compile" for name, is_here in sections.items() if is_here and getattr(config, name).compile]


def check_compiler(config: Config, role: RoleName) -> None:
    """Checks that torch.compile will find its C++ compiler on this machine, if the group computes on CPUs.

    On a GPU the compiler is Triton.

    Raises:
        ConfigError: there is none; the sentence has the key that needs it.
    """
    keys = compile_keys(config, role)
    compiler = os.environ.get("CXX", "g++")
    if keys and not config.services.of(role).devices and shutil.which(compiler) is None:
        raise ConfigError(
            f"{' and '.join(keys)}: torch.compile needs a C++ compiler, and the PATH of this machine has no"
            f" {compiler!r}: install it, name another one in the environment variable CXX, or leave the key out"
        )
