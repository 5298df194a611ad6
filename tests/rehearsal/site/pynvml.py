"""NVML of the pretended machine, which is found before the real one.

It answers what splitppo/machine/gpus.py and the GPU proof ask.
"""

import os
from typing import NamedTuple

_TOTAL = int(os.environ.get("REHEARSAL_GPU_BYTES", 80 << 30))


class NVMLError(Exception):
    """The error of NVML."""


class _Memory(NamedTuple):
    total: int
    free: int
    used: int


def nvmlInit() -> None:
    pass


def nvmlShutdown() -> None:
    pass


def nvmlSystemGetDriverVersion() -> str:
    return "pretended"


def nvmlDeviceGetCount() -> int:
    return int(os.environ.get("REHEARSAL_GPUS", "1"))


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return range(nvmlDeviceGetCount())[index]


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    for index in range(nvmlDeviceGetCount()):
        if nvmlDeviceGetUUID(index) == uuid:
            return index
    raise NVMLError("Not Found")


def nvmlDeviceGetIndex(handle: int) -> int:
    return handle


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{handle:012d}"


def nvmlDeviceGetName(handle: int) -> str:
    return os.environ.get("REHEARSAL_GPU_NAME", "pretended")


def nvmlDeviceGetMemoryInfo(handle: int) -> _Memory:
    return _Memory(_TOTAL, _TOTAL // 4 * 3, _TOTAL - _TOTAL // 4 * 3)
