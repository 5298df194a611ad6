"""Writes commands of this project so that a user can paste them, and says what to install if a package is missing."""

import shlex
import sys
from pathlib import Path

# The extra of pyproject.toml that brings a package which only some users need, by the name that is imported.
_EXTRAS = {
    "matplotlib": "report",
    "mcp": "mcp",
    "omegaconf": "from-verl",
    "pynvml": "worker",
    "starlette": "viewer",
    "uvicorn": "viewer",
    "websockets": "openenv",
}


def our_python() -> str:
    """Returns the Python of this process, for a shell in the same folder, whether an environment is entered or not."""
    python = Path(sys.executable)
    here = Path.cwd()
    return shlex.quote(str(python.relative_to(here) if python.is_relative_to(here) else python))


def our_command(module: str, *arguments: object) -> str:
    """Returns the command that runs a module of this project with these arguments, which are quoted for a shell."""
    return " ".join([our_python(), "-m", module, *(shlex.quote(str(argument)) for argument in arguments)])


def missing_package(name: str | None, extra: str | None = None) -> str:
    """Returns a sentence: this Python does not have the package that is imported by this name, and what installs it.

    `extra` is the one that the caller needs, where several have the package.
    """
    extra = extra or _EXTRAS.get((name or "").partition(".")[0])
    remedy = f"{our_python()} -m pip install 'splitppo[{extra}]'"
    if extra is None:
        remedy = "`make setup` makes an environment, `. .venv/bin/activate` enters it"
    return f"{sys.executable} does not have the package {name}: {remedy}"
