"""Numbers the GPUs that this process may use, as services.*.devices does, and reads their memory from NVML.

A process that has the environment variable CUDA_VISIBLE_DEVICES may use the GPUs of that list: GPU 0 is the first of
the list, whatever number nvidia-smi gives it. Without the variable the numbers are those of nvidia-smi.

NVML is used because a call of CUDA would make a CUDA context, and could break the capture of a CUDA graph on another
thread.
"""

import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple

from splitppo.config_error import ConfigError
from splitppo.our_commands import missing_package

log = logging.getLogger(__name__)

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# The number of nvidia-smi, or a UUID of a GPU or of a part of one (MIG), also in the older form MIG-GPU-<uuid>/1/0.
_ENTRY = re.compile(r"[0-9]+|(GPU|MIG)-\S+")


class GpuMemory(NamedTuple):
    """The free and the total memory of one GPU, in bytes; 0 if the number is not known."""

    free: int = 0
    total: int = 0


def offered_gpus() -> tuple[str, ...] | None:
    """Returns the entries of this process's CUDA_VISIBLE_DEVICES; None without the variable.

    CUDA takes an entry that names no GPU, such as -1, for the end of the list.
    """
    listed = os.environ.get(VISIBLE_DEVICES)
    if listed is None:
        return None
    return tuple(takewhile(_ENTRY.fullmatch, (entry.strip() for entry in listed.split(","))))


def check_offered(key: str, devices: Sequence[int], num_gpus: int | None = None) -> None:
    """Checks that the numbers in `devices`, the value of `key`, are GPUs that this process may use; else ConfigError.

    `num_gpus` is the number of those GPUs that this machine has; None: nobody has counted them, only the places in
    CUDA_VISIBLE_DEVICES are checked.
    """
    highest = max(devices, default=-1)
    offered = offered_gpus()
    listed = f"{VISIBLE_DEVICES}={os.environ.get(VISIBLE_DEVICES)}"
    if offered is not None and highest >= len(offered):
        places = f": devices are places in that list, here from 0 to {len(offered) - 1}" if offered else ""
        problem = f"{listed} offers {len(offered)} GPUs{places}"
    elif num_gpus is None or highest < num_gpus:
        return
    elif missing := _missing_nvml():
        problem = f"the GPUs of this machine cannot be counted: {missing}"
    elif offered is None:
        problem = f"this machine offers {num_gpus} GPUs"
    else:
        has = f"only the first {num_gpus}" if num_gpus else "none"
        problem = f"of the GPUs in {listed} this machine has {has}"
    raise ConfigError(f"{key} is {list(devices)}, but {problem}; leave {key} empty to compute on the CPU")


def visible_devices(key: str, devices: Sequence[int]) -> str:
    """Returns the CUDA_VISIBLE_DEVICES with which a new process sees these GPUs and no others, in this order.

    Raises:
        ConfigError: `devices`, the value of `key`, has a number outside of the CUDA_VISIBLE_DEVICES of this process.
    """
    offered = offered_gpus()
    if offered is None:
        return ",".join(map(str, devices))
    check_offered(key, devices)
    return ",".join(offered[device] for device in devices)


def total_bytes_of_gpus() -> dict[int, int]:
    """Returns the total memory in bytes of each GPU that this process may use, by its number; empty without a driver.

    The memory is 0 for a GPU that shares the memory of the machine.
    """
    try:
        nvml = _nvml()
        handles = _handles(nvml)
    except _NotKnown as error:
        log.info("the GPUs of this machine are not known: %s", error)
        return {}
    sizes: dict[int, int] = {}
    offered = offered_gpus()
    names = [*map(str, range(len(handles)))] if offered is None else offered
    # The list ends for CUDA at the first number that no GPU has.
    for index, name in enumerate(takewhile(lambda name: not name.isdigit() or int(name) < len(handles), names)):
        sizes[index] = 0
        with suppress(nvml.NVMLError):
            sizes[index] = int(nvml.nvmlDeviceGetMemoryInfo(_find(nvml, name, handles)).total)
    return sizes


class _NotKnown(Exception):
    """Raised if NVML cannot be asked; the message says why."""


def _nvml() -> Any:
    """Returns the module of NVML, ready to be asked; _NotKnown without the package or a driver."""
    if missing := _missing_nvml():
        raise _NotKnown(missing)
    import pynvml  # late: only machines with GPUs need it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _NotKnown(str(error)) from error
    return pynvml


def _missing_nvml() -> str:
    """Returns a sentence which package is missing to ask NVML, and what installs it; empty if none is."""
    try:
        import pynvml  # noqa: F401
    except ModuleNotFoundError as error:
        return missing_package(error.name)
    return ""


def _handles(nvml: Any) -> list[Any]:
    """Returns the NVML handles of all GPUs of this machine, in the order of nvidia-smi."""
    try:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise _NotKnown(str(error)) from error


def _find(nvml: Any, name: str, handles: Sequence[Any]) -> Any:
    """Returns the NVML handle of an entry of CUDA_VISIBLE_DEVICES; a UUID may be cut short, as CUDA allows."""
    if name.isdigit():
        return handles[int(name)]
    for handle in handles:
        if nvml.nvmlDeviceGetUUID(handle).startswith(name):
            return handle
    return nvml.nvmlDeviceGetHandleByUUID(name)  # a part of a GPU


def name_in_nvidia_smi(uuid: str) -> str:
    """Returns the number that nvidia-smi on this machine gives the GPU `GPU-<uuid>`, in words; its UUID if it has none.

    A part of a GPU (MIG) has none.
    """
    name = f"GPU-{uuid}"
    with suppress(_NotKnown):
        nvml = _nvml()
        with suppress(nvml.NVMLError):
            return f"GPU {nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(name))} of nvidia-smi"
    return name


def memory_reader(uuid: str) -> Callable[[], GpuMemory]:
    """Returns a function that reads the memory of the GPU `GPU-<uuid>` each time; it never raises, on any thread."""
    try:
        nvml = _nvml()
        handle = _handle_of(nvml, uuid)
    except _NotKnown as error:
        log.info("the memory of the GPU is not known: %s", error)
        return GpuMemory

    def read() -> GpuMemory:
        with suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            return GpuMemory(int(memory.free), int(memory.total))
        return GpuMemory()

    return read


def _handle_of(nvml: Any, uuid: str) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError as error:
        raise _NotKnown(str(error)) from error
