"""Imports what the ranks of a group import, in a process from which they are forked; no rank then needs the seconds.

Such a process has one thread, no port, no gRPC channel, and has not touched CUDA. What libraries read only when they
are loaded is in its environment before.
"""

import importlib
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec

from splitppo.machine.heavy_imports import heavy_imports

# The next step needs the memory that a step frees. By default glibc gives large blocks back to the kernel, which then
# has to clear pages for the same tensors; 32 MiB is the largest block that glibc can be told to keep. glibc reads this
# when a program starts.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
_AT_START = {
    **KEPT_MEMORY,
    # oneDNN compiles a product anew for every number of rows. Packed rows come in ever new numbers, and by default
    # 1024 of them would stay, in each of two caches; a pass needs about ten.
    "LRU_CACHE_CAPACITY": "32",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    # Else torch's C++ warns of every peer that goes with a stack of twenty lines; `report` prints one line.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_AT_IMPORT = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy would start threads
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # who asks whether there is a GPU does not start CUDA, which no fork survives
}


def start_again_unless_set() -> None:
    """Replaces this process by itself with `_AT_START` in its environment, if a variable of `_AT_START` is not set.

    Some of these variables are read only when a program starts. A variable that the user has set keeps the user's
    value. Call it before anything large is imported.
    """
    if not _AT_START.keys() <= os.environ.keys():
        os.execve(sys.executable, sys.orig_argv, {**_AT_START, **os.environ})  # noqa: S606


def module_of_ranks(module: str | None) -> str | None:
    """Returns the module that a rank of `python -m MODULE` imports at its start: MODULE.rank; None if there is none."""
    parent = find_spec(module) if module else None
    has_parts = parent is not None and parent.submodule_search_locations is not None
    return f"{module}.rank" if has_parts and find_spec(f"{module}.rank") else None


def import_for_ranks(modules: Iterable[str] = ()) -> None:
    """Imports these modules, and what starts ranks, and leaves the environment as it was."""
    added = {name: value for name, value in _AT_IMPORT.items() if name not in os.environ}
    os.environ.update(added)
    with heavy_imports():
        for module in ("services.runtime.group.closed_group", *modules):
            importlib.import_module(module)
    for name in added:
        del os.environ[name]
