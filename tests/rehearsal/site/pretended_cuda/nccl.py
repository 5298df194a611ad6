"""A process group with NCCL's rules: tensors of this rank's device alone, contiguous, of a type that NCCL knows.

gloo computes the collectives, on the same memory. Tensors of the CPU go to gloo as well: this stands for the whole
group `cpu:gloo,cuda:nccl`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

# ncclDataType_t; torch sends bool as uint8.
KNOWN_TYPES = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
}

SPLIT_TIMEOUT_S = 60.0


def install() -> None:
    """Makes torch.distributed have NCCL."""
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = PretendedNccl


class _Options:
    """The options of NCCL that torch.distributed sets."""

    _timeout: timedelta
    is_high_priority_stream = False
    split_from: Any = None
    split_color = 0
    global_ranks_in_group: Sequence[int] = ()
    group_name = ""


class PretendedNccl(ProcessGroup):
    """The group of torch's NCCL backend, on pretended devices."""

    Options = _Options
    supports_splitting = True

    def __init__(self, store: Store, rank: int, size: int, options: _Options) -> None:
        super().__init__(rank, size)
        self._gloo = ProcessGroupGloo(store, rank, size, options._timeout)
        self._store = store
        self._name = options.group_name
        self._device: torch.device | None = None
        self._num_splits = 0
        if options.split_from is not None:
            options.split_from.split()

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Binds the group to a device: groups that are made later are split from it."""
        self.bound_device_id = device
        self._check_device("init_process_group", device)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Lets the others split a group from this one, to which this rank does not belong."""
        self.split()

    def split(self) -> None:
        """Waits for all ranks, since ncclCommSplit is a collective of all of them.

        Raises:
            RuntimeError: not all ranks came, with which NCCL would hang.
        """
        self._num_splits += 1
        key = f"splits/{self._num_splits}"
        self._store.add(key, 1)
        ends = time.monotonic() + SPLIT_TIMEOUT_S
        while self._store.add(key, 0) < self.size():
            if time.monotonic() > ends:
                raise RuntimeError(f"ncclCommSplit: rank {self.rank()} waits for ranks that make no group: a hang")
            time.sleep(0.01)

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cuda" else self._gloo

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        options = options or dist.AllreduceOptions()
        work = self._gloo.allreduce(self._taken("allreduce", tensors), _summing(options))
        return self._averaged(work, tensors, options)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> Any:
        return [self.allreduce([tensor], options) for tensor in tensors][-1]

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._gloo.broadcast(self._taken("broadcast", tensors), options or dist.BroadcastOptions())

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        self._taken("all_gather", [*inputs, *(tensor for some in outputs for tensor in some)])
        on_cpu = [[_as_cpu(tensor) for tensor in some] for some in outputs]
        return self._gloo.allgather(on_cpu, [_as_cpu(tensor) for tensor in inputs])

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        return self._gloo._allgather_base(*self._taken("all_gather_into_tensor", [output, given]))

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> Any:
        return [self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        options = options or dist.ReduceScatterOptions()
        on_cpu = self._taken("reduce_scatter_tensor", [output, given])
        return self._averaged(self._gloo._reduce_scatter_base(*on_cpu, _summing(options)), [output], options)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> Any:
        return [self.reduce_scatter_single(*pair, options) for pair in zip(outputs, inputs, strict=True)][-1]

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], options: Any = None
    ) -> Any:
        on_cpu = self._taken("all_to_all_single", [output, given])
        return self._gloo.alltoall_base(*on_cpu, output_sizes, input_sizes, options or dist.AllToAllOptions())

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        self._taken("gather", [*inputs, *(tensor for some in outputs for tensor in some)])
        on_cpu = [[_as_cpu(tensor) for tensor in some] for some in outputs]
        return self._gloo.gather(on_cpu, [_as_cpu(tensor) for tensor in inputs], options)

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        return self._gloo.send(self._taken("send", tensors), rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        return self._gloo.recv(self._taken("recv", tensors), rank, tag)

    def barrier(self, options: Any = None) -> Any:
        return self._gloo.barrier(options or dist.BarrierOptions())

    # The names of torch 2.11.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def getBackendName(self) -> str:
        return "nccl"

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _taken(self, call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors for gloo; refuses those that NCCL refuses.

        Raises:
            RuntimeError: as torch or NCCL say it.
        """
        on_device = [tensor for tensor in tensors if tensor.is_cuda]
        if on_device:
            self._check(call, on_device, len(tensors))
        return [_as_cpu(tensor) for tensor in tensors]

    def _check(self, call: str, tensors: Sequence[Tensor], num_tensors: int) -> None:
        if len(tensors) != num_tensors:
            raise RuntimeError(f"{call}: Tensors must be CUDA and dense, but some are on the CPU")
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise RuntimeError(f"{call}: Tensors must be contiguous")
        if unknown := {tensor.dtype for tensor in tensors} - KNOWN_TYPES:
            raise RuntimeError(f"{call}: Input tensor data type is not supported for NCCL process group: {unknown}")
        for tensor in tensors:
            self._check_device(call, tensor.device)

    def _check_device(self, call: str, device: torch.device) -> None:
        """A group has one communicator per rank, on one device, and no two ranks have the same GPU."""
        if self._device is None:
            self._device = device
            self._store.set(f"gpu/{self.rank()}", str(torch.ops.rehearsal.visible_gpus()[device.index]))
            gpus = [self._store.get(f"gpu/{rank}") for rank in range(self.size())]
            if len(set(gpus)) < len(gpus):
                raise RuntimeError(f"{call}: ncclInvalidUsage: Duplicate GPU detected: of the ranks' GPUs {gpus}")
        if device != self._device:
            raise RuntimeError(f"{call}: tensors of {device}, but rank {self.rank()} communicates on {self._device}")

    def _averaged(self, work: Any, tensors: Sequence[Tensor], options: Any) -> Any:
        """Waits and divides what was added up, where NCCL would average: gloo cannot."""
        if options.reduceOp == dist.ReduceOp.AVG:
            work.wait()
            for tensor in tensors:
                tensor.div_(self.size())
        return work


def _as_cpu(tensor: Tensor) -> Tensor:
    return torch.ops.rehearsal.as_cpu(tensor) if tensor.is_cuda else tensor


def _summing(options: Any) -> Any:
    """Returns options of a sum where those of an average are given."""
    if options.reduceOp != dist.ReduceOp.AVG:
        return options
    summing = type(options)()
    summing.reduceOp = dist.ReduceOp.SUM
    summing.asyncOp = getattr(options, "asyncOp", False)
    return summing
