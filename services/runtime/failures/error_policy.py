"""Decides which error of a command ends the group, and which error the caller gets if the group goes on."""

import re

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from splitppo.manifest import DamagedCheckpoint
from splitppo.rpc.errors import Internal, OutOfMemory, Place, WireError, wire_error
from splitppo.user_file import describe

_PEER_LOSS = re.compile(r"gloo/|nccl|connection (closed|reset|refused)|broken pipe", re.IGNORECASE)
# What NCCL says (ncclGetErrorString) if the GPU or the call of this rank is at fault: ncclUnhandledCudaError,
# ncclInvalidArgument and ncclInvalidUsage; also what CUDA says, since a CUDA error's stack may name NCCL.
_OWN_FAULT = re.compile(
    r"unhandled ?cuda ?error|invalid (argument|usage) \(run with NCCL_DEBUG|cuda (error|failure)", re.IGNORECASE
)
# CUDA's errors as RuntimeError: of cuBLAS and cuDNN, and of vLLM's allocator (cumem_allocator.cpp).
_DEVICE_ERROR = re.compile(r"CUDA error: ", re.IGNORECASE)
_NO_MEMORY = re.compile(r"out of memory|not enough memory|_STATUS_ALLOC_FAILED|failed to cuda calloc", re.IGNORECASE)


def is_peer_loss(error: BaseException) -> bool:
    """Returns True if a collective raises an error like this one when another rank has died or disconnected.

    An error of NCCL that this rank has caused itself, by its GPU or by its call, is none.
    """
    if not isinstance(error, RuntimeError) or _OWN_FAULT.search(str(error)):
        return False
    return isinstance(error, dist.DistError) or bool(_PEER_LOSS.search(str(error)))


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if the error means that an allocation of host or device memory failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def _is_of_device(error: BaseException) -> bool:
    """Returns True for an error that CUDA has raised: all that the process has on its GPU may be lost."""
    is_of_cuda = isinstance(error, RuntimeError) and bool(_DEVICE_ERROR.match(str(error)))
    return is_of_cuda or isinstance(error, torch.AcceleratorError)


def cannot_go_on(error: BaseException, *, num_ranks: int, loads: bool) -> bool:
    """Returns True if the group has to end because a command failed while the ranks ran it.

    A group of several ranks always ends: the others would wait for the rank that failed. A group of one ends if only a
    new process helps: its device is broken (an illegal access, a lost GPU), or a command that `loads` weights failed
    for another reason than its input (WireError, ValueError, OSError).
    """
    if num_ranks > 1 or (_is_of_device(error) and not is_out_of_memory(error)):
        return True
    return loads and not isinstance(error, WireError | ValueError | OSError)


def cannot_save(error: BaseException, *, num_ranks: int) -> bool:
    """Returns True if the group has to end because its ranks could not finish a save together.

    If only storage has failed, the ranks can go on, and the caller gets the error. Any other error means that a rank
    was lost, or that the other ranks do not know of the error.
    """
    return num_ranks > 1 and not isinstance(error, OSError | WireError | DamagedCheckpoint)


def engine_error(error: Exception, *, has_stepped: bool, loads: bool) -> WireError:
    """Makes the caller's gRPC error for a command that failed while the ranks ran it, in a group that goes on.

    `has_stepped`: the optimizer has changed weights before the error. The input of a command that `loads` may be the
    caller's mistake.
    """
    here = Place(rank=0)
    if is_out_of_memory(error) and not has_stepped and not loads:
        return OutOfMemory(f"out of memory: {error}", here)
    if isinstance(error, WireError) or loads:
        return wire_error(error, here)
    return Internal(describe(error), here)


class OptimizerStepCounter:
    """Counts this process's optimizer steps; the count shows whether a failed update has already changed weights."""

    def __init__(self) -> None:
        self.num_steps = 0
        register_optimizer_step_pre_hook(self._count)

    def _count(self, _: Optimizer, __: object, ___: object) -> None:
        self.num_steps += 1
