"""Shards a model over the ranks of the default process group with FSDP2, and wraps the collectives in use.

Without a process group there is one rank. At one rank and fp32 compute no module is sharded: sharding over one rank is
the identity, and FSDP2's hooks and copies would only cost time (docs/adr/007).
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from splitppo.machine.memory_limits import KEEP_GATHERED_BYTES


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


def shard(model: nn.Module, *, device: torch.device, bf16: bool, forward_method: str) -> None:
    """Shards a model whose weights are on the meta device; each rank gets memory for its shard, without values.

    Every decoder layer is an FSDP2 unit, and everything else is the root unit. With `bf16` forward and backward passes
    compute in bfloat16; weights and the reduction of gradients stay float32. The method `forward_method` of the model
    gathers weights like `forward`.
    """
    if num_ranks() > 1 or bf16:
        mesh = init_device_mesh(device.type, (num_ranks(),))
        reshard = not _stays_gathered(model)
        policy = MixedPrecisionPolicy()
        if bf16:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in (*decoder_layers(model), model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    materialise(model, device)
    for unit in units(model):
        unit.set_gradient_divide_factor(1.0)  # losses are weighted by global totals: gradients add up
        unit.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, forward_method)


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


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Returns the decoder layers of a transformer: its longest nn.ModuleList."""
    return max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)


def units(model: nn.Module) -> list[FSDPModule]:
    """Returns the modules of a model that FSDP2 shards, root first; an empty list for a model without sharding."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def sync_gradients(model: nn.Module, *, last: bool) -> None:
    """Lets small models reduce gradients only in the `last` backward pass of a mini-batch; called before each pass."""
    if isinstance(model, FSDPModule) and _stays_gathered(model):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def _stays_gathered(model: nn.Module) -> bool:
    return 4 * sum(parameter.numel() for parameter in model.parameters()) <= KEEP_GATHERED_BYTES


def gather(model: nn.Module) -> None:
    """Gathers all weights of a model on every rank until `release`, so that forward passes communicate nothing."""
    for unit in units(model):
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)


def release(model: nn.Module) -> None:
    """Frees a model's gathered weights; needed after forward passes without backward, else they would become stale."""
    keep = _stays_gathered(model)
    for unit in units(model):
        unit.set_reshard_after_forward(not keep, recurse=False)
        unit.reshard()


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor as a plain tensor; any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor) -> tuple[int, int]:
    """Returns the row range [start, stop) of a sharded tensor's first dimension on this rank; (0, 1) for a scalar."""
    num_rows = tensor.shape[0] if tensor.ndim else 1
    if not isinstance(tensor, DTensor):
        return 0, num_rows
    size = math.ceil(num_rows / num_ranks())  # as torch.chunk divides
    start = min(rank() * size, num_rows)
    return start, start + len(tensor.to_local())


def full(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor and returns the whole tensor on every rank; all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scales gradients to a global norm of at most max_norm, if the norm is finite; returns the norm before scaling."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    norm = math.sqrt(all_reduce(torch.nn.utils.get_total_norm(gradients).double() ** 2).item())
    if math.isfinite(norm) and norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
    return norm
