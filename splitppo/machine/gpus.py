"""Reads the GPUs of this machine and their memory from NVML.

NVML is used because a call of CUDA would make a CUDA context, and could break the capture of a CUDA graph on another
thread.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

log = logging.getLogger(__name__)


class GpuMemory(NamedTuple):
    """The free and the total memory of one GPU, in bytes; 0 if the number is not known."""

    free: int = 0
    total: int = 0


def total_bytes_of_gpus() -> dict[int, int]:
    """Returns the total memory of each GPU in bytes, by the index that nvidia-smi shows; empty without a driver.

    The memory is 0 for a GPU that shares the memory of the machine.
    """
    import pynvml  # late: only runs with GPUs need it

    sizes = {}
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            sizes[index] = 0
            with suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                sizes[index] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return sizes


def memory_reader(uuid: str) -> Callable[[], GpuMemory]:
    """Returns a function that reads the memory of the GPU `GPU-<uuid>` each time; it never raises, on any thread."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        log.info("the memory of the GPU is not known: %s", error)
        return GpuMemory

    def read() -> GpuMemory:
        with suppress(pynvml.NVMLError):
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            return GpuMemory(int(memory.free), int(memory.total))
        return GpuMemory()

    return read
