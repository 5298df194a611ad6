"""The device that a rank computes on, for people: its name, and how much memory is free there now."""

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from splitppo.machine.gpus import memory_reader


@dataclass(frozen=True)
class DeviceState:
    """A GPU, or a machine's CPU with its main memory; what is not known is empty or 0."""

    name: str = ""
    free_bytes: int = 0
    total_bytes: int = 0


def device_watch(device: torch.device) -> Callable[[], DeviceState]:
    """Returns a function that says how the device is now; it never raises, and any thread may call it."""
    if device.type != "cuda":
        return _main_memory
    properties = torch.cuda.get_device_properties(device)
    read_memory = memory_reader(str(properties.uuid))
    return lambda: DeviceState(properties.name, *read_memory())


def _main_memory() -> DeviceState:
    memory = psutil.virtual_memory()
    return DeviceState("CPU", memory.available, memory.total)
