"""The strategy `fsdp2`: weights, gradients and moments are divided over the rows of the group's mesh."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from services.engine import parallel
from services.engine.mesh import GroupMesh
from splitppo.machine.memory_limits import KEEP_GATHERED_BYTES


class Fsdp2:
    """FSDP2 with one unit for each decoder layer, and everything else in the root unit; see `Strategy`.

    A vision tower is in the root unit, whose weights every forward pass gathers: as a unit of its own, it would be
    gathered by those ranks alone that have images.

    At one rank and fp32 compute no module is sharded: sharding over one rank is the identity, and FSDP2's hooks and
    copies would only cost time (docs/adr/007).
    """

    def __init__(self, mesh: GroupMesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device

    @cached_property
    def _device_mesh(self) -> DeviceMesh:
        return self._mesh.device_mesh(self._device.type)

    def shard(self, model: nn.Module, *, bf16: bool, forward_method: str) -> None:
        """See `Strategy.shard`; gradients are reduced in float32."""
        if self._mesh.num_ranks > 1 or bf16:
            reshard = not _stays_gathered(model)
            policy = MixedPrecisionPolicy()
            if bf16:
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for unit in (*decoder_layers(model), model):
                fully_shard(unit, mesh=self._device_mesh, reshard_after_forward=reshard, mp_policy=policy)
        parallel.materialise(model, self._device)
        for unit in units(model):
            unit.set_gradient_divide_factor(1.0)  # losses are weighted by global totals: gradients add up
            unit.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(model, forward_method)

    @contextmanager
    def sync_gradients(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Lets a model with few trained weights reduce gradients only in the `last` pass; see the `Strategy`."""
        if isinstance(model, FSDPModule):
            if 4 * sum(weight.numel() for weight in model.parameters() if weight.requires_grad) <= KEEP_GATHERED_BYTES:
                model.set_requires_gradient_sync(last)
            if _stays_gathered(model):
                model.set_reshard_after_backward(last)
        yield

    def gather(self, model: nn.Module) -> None:
        """See `Strategy.gather`."""
        for unit in units(model):
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)

    def release(self, model: nn.Module) -> None:
        """Frees the gathered weights after a pass; see `Strategy.release`.

        FSDP does not reshard a unit that stays gathered between forward and backward after a forward pass alone: the
        unit would compute with old weights after the next update. Whether units stay gathered is set anew, because
        `gather` has made them stay.
        """
        keep = _stays_gathered(model)
        for unit in units(model):
            unit.set_reshard_after_forward(not keep, recurse=False)
            unit.reshard()

    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """See `Strategy.clip_gradients`."""
        return parallel.clip_gradients(parameters, max_norm)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Returns the decoder layers of a transformer: its longest nn.ModuleList, without those of a vision tower."""
    part = getattr(getattr(model, "base_model", None), "language_model", model)
    return max((module for module in part.modules() if isinstance(module, nn.ModuleList)), key=len)


def units(model: nn.Module) -> list[FSDPModule]:
    """Returns the modules of a model that FSDP2 shards, root first; an empty list for a model without sharding."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _stays_gathered(model: nn.Module) -> bool:
    """Returns True if the whole weights are small enough to stay in memory between forward and backward.

    A weight counts 4 bytes; beside adapters, a frozen weight counts as many as it has in the computation.
    """
    weights = list(model.parameters())
    has_adapters = len({weight.requires_grad for weight in weights}) > 1
    num_bytes = sum(
        weight.numel() * (weight.itemsize if has_adapters and not weight.requires_grad else 4) for weight in weights
    )
    return num_bytes <= KEEP_GATHERED_BYTES
