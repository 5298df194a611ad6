"""Writes commands of this project so that a user can paste them: with the Python that has its packages."""

import shlex
import sys
from pathlib import Path

NO_PACKAGE = "error: {} has no package {}: `make setup` makes an environment, `. .venv/bin/activate` enters it\n"


def our_python() -> str:
    """Returns the Python of this process, for a shell in the same folder, whether an environment is entered or not."""
    python = Path(sys.executable)
    here = Path.cwd()
    return shlex.quote(str(python.relative_to(here) if python.is_relative_to(here) else python))


def our_command(module: str, *arguments: object) -> str:
    """Returns the command that runs a module of this project with these arguments, which are quoted for a shell."""
    return " ".join([our_python(), "-m", module, *(shlex.quote(str(argument)) for argument in arguments)])
