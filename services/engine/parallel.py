"""Functions for models and tensors that the ranks of the default process group hold together, in any strategy.

Without a process group there is one rank. How a tensor is divided is read from the tensor (`Strategy`).
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def num_ranks() -> int:
    """Returns the number of ranks in the default process group; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Returns this process's rank in the default process group; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """All-reduces a tensor over all ranks in place (by default the sum), and returns the tensor."""
    if num_ranks() > 1:
        dist.all_reduce(tensor, op)
    return tensor


def reduce_array(
    values: Any, device: torch.device, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> NDArray[np.float64]:
    """All-reduces numbers in host memory over all ranks (by default the sum); returns them as a float64 array."""
    tensor = torch.from_numpy(np.array(values, np.float64)).to(device)
    reduced: NDArray[np.float64] = all_reduce(tensor, op).cpu().numpy()
    return reduced


def materialise(model: nn.Module, device: torch.device) -> None:
    """Allocates memory on `device` for meta parameters, without values; tied ones stay tied, buffers keep values."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001 # named_parameters leaves tied ones out
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[parameter]  # noqa: SLF001
    model.to(device)  # buffers; FSDP2 looks at its parameters again


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor as a plain tensor; any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor) -> tuple[int, int]:
    """Returns the row range [start, stop) of a sharded tensor's first dimension on this rank; (0, 1) for a scalar."""
    num_rows = tensor.shape[0] if tensor.ndim else 1
    if not isinstance(tensor, DTensor):
        return 0, num_rows
    start = 0
    for group in _shard_groups(tensor):
        size = math.ceil(num_rows / group.size())  # as torch.chunk divides
        start = min(group.rank() * size, num_rows)
    return start, start + len(tensor.to_local())


def placed_like(tensor: Tensor, values: Tensor) -> Tensor:
    """Makes a tensor of this rank's `values`, in any memory and of any dtype, that is divided over ranks like `tensor`.

    DTensor.from_local would move the values to the device of the mesh.
    """
    if not isinstance(tensor, DTensor):
        return values
    spec = tensor._spec  # noqa: SLF001
    assert spec.tensor_meta is not None
    meta = spec.tensor_meta._replace(dtype=values.dtype)
    make: Any = DTensor
    made: Tensor = make(values, dataclasses.replace(spec, tensor_meta=meta), requires_grad=False)
    return made


def full(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor and returns the whole tensor on every rank; all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scales gradients to a global norm of at most max_norm, if the norm is finite; returns the norm before scaling.

    Squares are summed over the ranks that share a gradient, and not over those that hold copies of it.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    placed_alike: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        placement = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        placed_alike.setdefault(placement, []).append(gradient)
    norm = math.sqrt(sum(_squared_norm(some) for some in placed_alike.values()))
    if math.isfinite(norm) and norm > max_norm:
        for gradient in gradients:
            local(gradient).mul_(max_norm / norm)
    return norm


def _squared_norm(tensors: Sequence[Tensor]) -> float:
    """Computes the squared norm of whole tensors that are all divided over the same ranks; these ranks call it."""
    square = torch.nn.utils.get_total_norm([local(tensor) for tensor in tensors]).double() ** 2
    for group in _shard_groups(tensors[0]):
        dist.all_reduce(square, group=group)
    return square.item()


def _shard_groups(tensor: Tensor) -> list[dist.ProcessGroup]:
    """Returns the groups of ranks over which a tensor is divided: at most one, and none for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [mesh.get_group(number) for number, placement in enumerate(tensor.placements) if placement.is_shard()]
