"""What a rank computes on, for people: its name, and how much memory is free there now.

NVML answers for GPUs, in its own library: a question to CUDA could break the capture of a graph on another thread.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

_NVML = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class DeviceState:
    """A GPU, or a machine's CPU with its main memory; what is not known is empty or 0."""

    name: str = ""
    free_bytes: int = 0
    total_bytes: int = 0


def device_watch(device: torch.device) -> Callable[[], DeviceState]:
    """A function that says how the device is now; it never raises, and any thread may call it."""
    if device.type != "cuda":
        return _main_memory
    properties = torch.cuda.get_device_properties(device)
    try:
        return _Gpu(properties.name, str(properties.uuid))
    except (OSError, AttributeError) as error:
        log.info("the free memory of the GPU is not known: %s", error)
        return lambda: DeviceState(properties.name)


def _main_memory() -> DeviceState:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return DeviceState("CPU", kib["MemAvailable"] << 10, kib["MemTotal"] << 10)
    except (OSError, LookupError, ValueError):
        return DeviceState("CPU")


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Gpu:
    """One GPU by NVML; OSError or AttributeError where NVML, or the GPU in it, cannot be had."""

    def __init__(self, name: str, uuid: str, library: str = _NVML) -> None:
        self._name = name
        self._nvml = ctypes.CDLL(library)
        self._handle = ctypes.c_void_p()
        _check(self._nvml.nvmlInit_v2())
        _check(self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(self._handle)))

    def __call__(self) -> DeviceState:
        memory: Any = _Memory()
        if self._nvml.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)):
            return DeviceState(self._name)
        return DeviceState(self._name, memory.free, memory.total)


def _check(status: int) -> None:
    if status:
        raise OSError(f"NVML answers with the error {status}")
