"""Tensors that ranks hold in replicas: rows, norms and sums are those of the whole tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from services.engine import parallel
from services.engine.mesh import GroupMesh
from services.engine.strategies.ddp import Ddp
from tests.support.engines import CPU
from tests.support.ranks import RunRanks, rank_processes

WHOLE = torch.arange(1.0, 16.0).reshape(5, 3)


@pytest.fixture(scope="module")
def run() -> Iterator[RunRanks]:
    with rank_processes(4) as run:
        yield run


def divided(fsdp_size: int, whole: Tensor = WHOLE) -> Tensor:
    """The tensor as FSDP2 places it on a mesh of all ranks."""
    mesh = GroupMesh.of(parallel.num_ranks(), fsdp_size).device_mesh("cpu")
    return distribute_tensor(whole, mesh, [Replicate(), Shard(0)][-mesh.ndim :])


def own_rows(fsdp_size: int) -> tuple[tuple[int, int], list[list[float]]]:
    """On a rank: the range of its rows, and their values."""
    tensor = divided(fsdp_size)
    return parallel.local_rows(tensor), parallel.local(tensor).tolist()


@pytest.mark.parametrize(
    ("fsdp_size", "expected"),
    [
        (-1, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (2, [(0, 3), (3, 5)] * 2),
        (1, [(0, 5)] * 4),
    ],
)
def test_neighbours_hold_the_rows_of_a_copy(run: RunRanks, fsdp_size: int, expected: list[tuple[int, int]]) -> None:
    for (rows, values), (start, stop) in zip(run(4, own_rows, fsdp_size), expected, strict=True):
        assert rows == (start, stop)
        assert values == WHOLE[start:stop].tolist()


def clip(fsdp_size: int, max_norm: float) -> tuple[float, float, list[list[float]]]:
    """On a rank: the norm of a divided and a whole gradient before clipping and after it, and a clipped gradient."""
    parameters = [nn.Parameter(divided(fsdp_size)), nn.Parameter(WHOLE.clone())]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    norm = parallel.clip_gradients(parameters, max_norm)
    return norm, parallel.clip_gradients(parameters, float("inf")), parallel.full(parameters[0].grad).tolist()


@pytest.mark.parametrize("fsdp_size", [-1, 2, 1])
def test_replicas_of_a_gradient_count_once_in_its_norm(run: RunRanks, fsdp_size: int) -> None:
    norm = float((2.0 * (WHOLE**2).sum()).sqrt())
    for before, after, gradient in run(4, clip, fsdp_size, 1.0):
        assert before == pytest.approx(norm, rel=1e-6)
        assert after == pytest.approx(1.0, rel=1e-5)
        torch.testing.assert_close(torch.tensor(gradient), WHOLE / norm)


class Branches(nn.Module):
    """Three weights, of which a rank uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.everywhere, self.somewhere, self.nowhere = (nn.Parameter(torch.ones(2)) for _ in range(3))


def add_up() -> list[list[float] | None]:
    """On a rank: gradients after two passes under ddp, one of which another rank has not computed."""
    strategy, model, rank = Ddp(GroupMesh.of(parallel.num_ranks()), CPU), Branches(), parallel.rank()
    for last in (False, True):
        with strategy.sync_gradients(model, last=last):
            loss = (rank + 1) * model.everywhere.sum()
            (loss + 10 * model.somewhere.sum() if rank == 1 else loss).backward()
    return [None if weight.grad is None else weight.grad.tolist() for weight in model.parameters()]


def test_ddp_adds_up_gradients_also_of_weights_that_some_ranks_have_not_used(run: RunRanks) -> None:
    assert run(2, add_up) == [[[6.0, 6.0], [20.0, 20.0], None]] * 2


@pytest.mark.parametrize("fsdp_size", [0, 3, 8, -2])
def test_a_mesh_has_no_rest(fsdp_size: int) -> None:
    with pytest.raises(ValueError, match=rf"fsdp_size \({fsdp_size}\) must divide the number of ranks \(4\)"):
        GroupMesh.of(4, fsdp_size)
