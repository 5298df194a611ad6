"""uv and pip, which install packages into an environment and look for them in the same places.

Packages come from wherever pip is configured to look (pip.conf, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS,
PIP_NO_INDEX). uv does the work because it is several times faster; if uv cannot, pip does. Both compile what they
install, unless UV_COMPILE_BYTECODE=0 or PIP_NO_COMPILE=1 says that Python shall do so when it first imports a module.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"
UV_OPTIONS = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links"}
# Whether an index can be reached at all is known after one try and another.
FEW_RETRIES = {"UV_HTTP_RETRIES": "1", "PIP_RETRIES": "1"}


@dataclass(frozen=True)
class Installer:
    """A program that installs into one environment, and compiles what it installs.

    Attributes:
        command: the command that installs, without dependencies.
        sources: options for the places where pip looks.
        index_option: the option that names an index in place of those.
    """

    command: tuple[str, ...]
    sources: tuple[str, ...]
    index_option: str

    def install(self, *what: str) -> bool:
        """Installs from pip's sources and shows its progress; returns True if it succeeded."""
        done = subprocess.run([*self.command, *self.sources, *what], env=child_environment(), check=False)
        return done.returncode == 0

    def try_install(self, requirement: str, index: str | None = None) -> bool:
        """Installs something that may be missing, from pip's sources or from `index`; prints nothing if it is
        missing.
        """
        places = [self.index_option, index] if index else self.sources
        environment = child_environment() | (FEW_RETRIES if index else {})
        done = subprocess.run([*self.command, *places, requirement], env=environment, capture_output=True, check=False)
        return done.returncode == 0


def uv(program: Path, python: Path, sources: Sequence[str]) -> Installer:
    """Returns uv as an installer; compiling is its own step, on all cores."""
    command = (str(program), "pip", "install", "--no-deps", "--python", str(python))
    return Installer(command, tuple(sources), "--default-index")


def pip(python: Path) -> Installer:
    """Returns pip as an installer, which knows its sources."""
    return Installer((str(python), "-m", "pip", "install", "--no-deps"), (), "--index-url")


def uv_options(pip_config: str) -> list[str]:
    """Returns uv's options for the lines of `pip config list`; an environment variable overrides a file, as for pip."""
    settings: dict[str, list[str]] = {}
    lines = sorted(pip_config.splitlines(), key=lambda line: (line.startswith(":env:"), line.startswith("install.")))
    for line in lines:
        key, separator, value = line.partition("=")
        if separator:
            settings[key.rpartition(".")[2].replace("_", "-")] = str(ast.literal_eval(value)).split()
    options = ["--index-strategy", "unsafe-best-match"]  # pip's own: the best version of all sources
    if settings.get("no-index", ["0"])[0].lower() in {"1", "true", "yes", "on", "y", "t"}:
        options.append("--no-index")
    for name, option in UV_OPTIONS.items():
        for value in settings.get(name, []):
            options += [option, value]
    return options


def pip_config(python: Path) -> str:
    """Returns the lines of pip's configuration, from its files and PIP_* variables alike."""
    command = [str(python), "-m", "pip", "config", "list"]
    return subprocess.run(command, env=child_environment(), stdout=subprocess.PIPE, text=True, check=False).stdout


def child_environment() -> dict[str, str]:
    """Returns our environment for installers.

    Pip's advice about itself is off, uv gets pip's certificates and compiles as pip does, and bytecode is allowed.
    """
    environment = {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "UV_SYSTEM_CERTS": "1",
        "UV_COMPILE_BYTECODE": "1",
        **os.environ,
    }
    if "PIP_CERT" in environment:
        environment.setdefault("SSL_CERT_FILE", environment["PIP_CERT"])
    for unwanted in ("VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(unwanted, None)
    return environment


def say(line: str) -> None:
    """Prints a line at once, so that it stands before the output of a child."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
