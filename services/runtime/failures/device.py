"""Reads the name and the free memory of the device that a rank computes on, for the doctor's report."""

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from splitppo.machine.gpus import memory_reader, name_in_nvidia_smi


@dataclass(frozen=True)
class DeviceState:
    """The name and memory in bytes of a GPU, or of a machine's CPU; a value that cannot be read is empty or 0.

    The name says which of the machine's GPUs it is: `cuda:0` is the first one of every group.
    """

    name: str = ""
    free_bytes: int = 0
    total_bytes: int = 0


def device_watch(device: torch.device) -> Callable[[], DeviceState]:
    """Returns a function that reads the name and memory of `device`; the function never raises and is thread-safe."""
    if device.type != "cuda":
        return _main_memory
    properties = torch.cuda.get_device_properties(device)
    read_memory = memory_reader(str(properties.uuid))
    name = f"{properties.name}, {name_in_nvidia_smi(str(properties.uuid))}"
    return lambda: DeviceState(name, *read_memory())


def _main_memory() -> DeviceState:
    memory = psutil.virtual_memory()
    return DeviceState("CPU", memory.available, memory.total)
