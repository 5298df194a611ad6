"""The device that a rank computes on, for the doctor's report: its name, and how much of its memory is free."""

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from splitppo.machine.gpus import memory_reader


@dataclass(frozen=True)
class DeviceState:
    """A GPU, or a machine's CPU with its main memory; a value that nothing reports is empty or 0."""

    name: str = ""
    free_bytes: int = 0
    total_bytes: int = 0


def device_watch(device: torch.device) -> Callable[[], DeviceState]:
    """Returns a function that reads the state of the device; it never raises, and any thread may call it."""
    if device.type != "cuda":
        return _main_memory
    properties = torch.cuda.get_device_properties(device)
    read_memory = memory_reader(str(properties.uuid))
    return lambda: DeviceState(properties.name, *read_memory())


def _main_memory() -> DeviceState:
    memory = psutil.virtual_memory()
    return DeviceState("CPU", memory.available, memory.total)
