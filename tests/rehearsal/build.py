"""Compiles the pretended CUDA device, once for each version of torch, of the compiler and of the source.

`python -m tests.rehearsal` and the fixtures ask here for the environment in which torch has the device.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE / "device"
CACHE = HERE.parents[1] / "build" / "rehearsal"
FLAGS = ["-O1", "-shared", "-fPIC", "-std=c++20"]


class NoDevice(Exception):
    """Why the device cannot be had here, in one sentence."""


def environment(num_gpus: int, *, gpu_name: str = "NVIDIA H100 80GB HBM3") -> dict[str, str]:
    """Returns the environment of processes on a machine with so many pretended GPUs, all of them visible.

    Raises:
        NoDevice: there is no compiler, no torch for a CPU, or the device does not compile.
    """
    variables = {**os.environ, **device_variables(num_gpus, gpu_name=gpu_name)}
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    return variables


def device_variables(num_gpus: int, *, gpu_name: str = "NVIDIA H100 80GB HBM3") -> dict[str, str]:
    """Returns the variables of the environment that give torch the device; see `environment`."""
    site = str(HERE / "site")
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", site)]
    return {
        "PYTHONPATH": os.pathsep.join([site, *folders]),
        "REHEARSAL_LIBRARY": str(library()),
        "REHEARSAL_GPUS": str(num_gpus),
        "REHEARSAL_GPU_NAME": gpu_name,
    }


def library() -> Path:
    """Returns the compiled device; compiles it if that was not done yet."""
    compiler = find_compiler()
    folder = torch_folder()
    parts = [importlib.metadata.version("torch"), compiler, *FLAGS]
    sources = sorted([*SOURCE.glob("*.h"), *SOURCE.glob("*.cpp")])
    digest = hashlib.sha256("\n".join([*parts, *(file.read_text() for file in sources)]).encode())
    compiled = CACHE / f"pretended_cuda-{digest.hexdigest()[:16]}.so"
    if not compiled.exists():
        compile_device(compiler, folder, compiled)
    return compiled


def find_compiler() -> str:
    """Returns the C++ compiler that CXX names, or c++, g++ or clang++."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise NoDevice("no C++ compiler here (c++, g++, clang++, or what CXX names)")


def torch_folder() -> Path:
    """Returns the folder of torch, which is not imported: that takes two seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NoDevice("no torch here")
    folder = Path(spec.origin).parent
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise NoDevice("torch has CUDA here, beside which no other device of this name can be")
    return folder


def compile_device(compiler: str, torch: Path, compiled: Path) -> None:
    """Compiles the device against a torch; the file appears when it is whole."""
    compiled.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=compiled.parent) as folder:
        made = Path(folder) / compiled.name
        command = [compiler, *FLAGS, "-isystem", str(torch / "include"), str(SOURCE / "pretended_cuda.cpp")]
        command += [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}", "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoDevice(f"{compiler} cannot compile {SOURCE}:\n{done.stderr.strip()}")
        made.replace(compiled)
