"""The strategy `ddp`: every rank holds all weights and moments, and gradients are added up."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed import ReduceOp

from services.engine import parallel
from services.engine.mesh import GroupMesh
from services.engine.strategies.fsdp2 import Fsdp2, units


class Ddp(Fsdp2):
    """Whole weights on every rank, for small models and for adapters; see `Strategy`.

    In fp32 the model is a plain module without hooks, whose gradients are added up once for each mini-batch. In bf16,
    FSDP2 holds the fp32 weights over a mesh of rows of one rank: it has the hooks already that cast weights for a pass
    and add up gradients in fp32, and a second copy of the weights in bf16 would have to be kept up to date.
    """

    def __init__(self, mesh: GroupMesh, device: torch.device) -> None:
        super().__init__(GroupMesh(replicate=mesh.num_ranks, shard=1), device)

    def shard(self, model: nn.Module, *, bf16: bool, forward_method: str) -> None:
        """See `Strategy.shard`."""
        if bf16:
            super().shard(model, bf16=True, forward_method=forward_method)
        else:
            parallel.materialise(model, self._device)

    @contextmanager
    def sync_gradients(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Adds gradients up over ranks at the end of the `last` pass; see the `Strategy`."""
        with super().sync_gradients(model, last=last):
            yield
        if last and not units(model):
            self._add_up(model)

    def _add_up(self, model: nn.Module) -> None:
        """Adds up gradients over all ranks in place; a parameter that has none on any rank keeps none."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        exists = parallel.reduce_array([weight.grad is not None for weight in trained], self._device, ReduceOp.MAX)
        for weight, has_gradient in zip(trained, exists, strict=True):
            if has_gradient:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                parallel.all_reduce(weight.grad)
