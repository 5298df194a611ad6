"""Asks this machine's NVIDIA driver which CUDA version it runs."""

from __future__ import annotations

import ctypes

REQUIRED_CUDA = (13, 0)  # of requirements/cuda.txt and vllm.txt; a driver runs every minor version of its CUDA's major


def cuda_version(library: str = "libcuda.so.1") -> tuple[int, int] | None:
    """Returns the newest CUDA that the driver behind `library` runs, as (13, 0); None without a driver or a GPU.

    The driver itself is asked, as torch will ask it: nvidia-smi is missing in many containers, and does not know
    CUDA_VISIBLE_DEVICES.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return None
    num_devices = ctypes.c_int()
    version = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(num_devices)) or not num_devices.value:
        return None
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10
