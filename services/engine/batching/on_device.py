"""Copies arrays of the host to the device that computes with them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Returns a copy of an array on a device, or on the CPU a tensor that may share its memory.

    The copy begins in memory that is pinned. From other memory, the host would wait until the GPU has done all that it
    was asked to do before, in every micro-batch.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
