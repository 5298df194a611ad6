"""The kind of failure of an error."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from services.runtime.context import Members
from services.runtime.failures.error_policy import OptimizerStepCounter, cannot_go_on, is_out_of_memory, is_peer_loss
from services.runtime.failures.peer_watch import PeerWatch
from splitppo.manifest import DamagedCheckpoint
from splitppo.rpc.errors import DataLoss
from tests.support.groups import wait_until

pytestmark = pytest.mark.slow

CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242"
TIMED_OUT = "[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete"


NCCL = "NCCL error in: torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.28\n{}\nLast error:\n{}"
REMOTE = NCCL.format("remote process exited or there was a network error", "ncclRemoteError: A call failed", "")
SYSTEM = NCCL.format("unhandled system error", "ncclSystemError: System call (e.g. socket, malloc) failed", "")
ABORTED = "NCCL communicator was aborted on rank 1."
NCCL_NO_MEMORY = NCCL.format(
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "Cuda failure 2 'out of memory'",
)
DUPLICATE_GPU = NCCL.format(
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
)
WATCHDOG = "[Rank 0] ProcessGroupNCCL's watchdog got an exception: CUDA error: an illegal memory access was encountered"
# As vLLM's communicator raises them (pynccl_wrapper.py), and its allocator (cumem_allocator.cpp).
VLLM_UNHANDLED = "NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
VLLM_REMOTE = "NCCL error: remote process exited or there was a network error"
CUMEM_NO_MEMORY = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:145"
CUMEM_INVALID = "CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:145"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CLOSED),
        RuntimeError(TIMED_OUT),
        RuntimeError(VLLM_REMOTE),
        *map(dist.DistBackendError, ("NCCL error", REMOTE, SYSTEM, ABORTED)),
        dist.DistNetworkError("recvValue failed"),
    ],
    ids=lambda error: str(error)[-40:],
)
def test_what_collectives_raise_when_a_rank_has_gone_is_a_lost_peer(error: Exception) -> None:
    assert is_peer_loss(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes differ"),
        ValueError(CLOSED),
        KeyError("gloo"),
        RuntimeError(VLLM_UNHANDLED),
        torch.AcceleratorError(WATCHDOG),
        *map(dist.DistBackendError, (NCCL_NO_MEMORY, DUPLICATE_GPU, WATCHDOG)),
    ],
    ids=lambda error: str(error)[-40:],
)
def test_other_errors_are_this_ranks_own(error: Exception) -> None:
    assert not is_peer_loss(error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError(CUMEM_NO_MEMORY), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (dist.DistBackendError(NCCL_NO_MEMORY), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError(CUMEM_INVALID), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_out_of_memory_is_told_apart_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


ILLEGAL_ACCESS = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
NO_MEMORY = torch.AcceleratorError("CUDA error: out of memory")


@pytest.mark.parametrize(
    ("error", "num_ranks", "loads", "expected"),
    [
        (ValueError("shapes differ"), 2, False, True),
        (ValueError("shapes differ"), 1, False, False),
        (ILLEGAL_ACCESS, 1, False, True),
        (RuntimeError(CUMEM_INVALID), 1, False, True),
        (NO_MEMORY, 1, False, False),
        (RuntimeError(CUMEM_NO_MEMORY), 1, False, False),
        (NO_MEMORY, 2, False, True),
        # A load that fails for another reason than its input: nothing else would bring the group back.
        (RuntimeError("broken"), 1, True, True),
        (NO_MEMORY, 1, True, True),
        (RuntimeError("broken"), 1, False, False),
        (DamagedCheckpoint("torn"), 1, True, False),
        (OSError("I/O error"), 1, True, False),
        (DataLoss("the ledger is another one"), 1, True, False),
    ],
)
def test_a_group_ends_where_its_ranks_would_wait_for_one_or_only_a_new_process_helps(
    error: Exception, num_ranks: int, *, loads: bool, expected: bool
) -> None:
    assert cannot_go_on(error, num_ranks=num_ranks, loads=loads) == expected


def test_optimizer_steps_are_counted_whatever_the_optimizer() -> None:
    counter = OptimizerStepCounter()
    weights = torch.nn.Parameter(torch.zeros(1))
    weights.grad = torch.ones(1)
    torch.optim.SGD([weights], lr=0.1).step()
    torch.optim.AdamW([weights], lr=0.1).step()
    assert counter.num_steps == 2


END = """
from types import SimpleNamespace
import torch.distributed as dist
from services.runtime.failures.peer_watch import PeerWatch
from services.runtime.context import Members
from services.runtime.failures.record import Failure, write_failure
from splitppo.rpc.errors import Place

def answer(error):
    raise OSError(30, "Read-only file system")

watch = PeerWatch(SimpleNamespace(rank=0, role_name="actor"), dist.HashStore(), Members((), (), {}))
watch.on_failure = answer
try:
    watch.end_group(ValueError("broken"), Place())
finally:
    print("still there", flush=True)
"""


def test_a_rank_whose_callers_cannot_be_answered_ends_all_the_same() -> None:
    ended = subprocess.run([sys.executable, "-c", END], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")


def test_a_follower_hears_that_its_command_is_cancelled_and_never_of_another_one() -> None:
    follower: Any = SimpleNamespace(rank=1, role_name="actor")
    watch = PeerWatch(follower, dist.HashStore(), Members((), (), {}))
    watch.start()
    try:
        watch.cancel(7)
        assert not watch.is_cancelled(8)
        watch.cancel(8)
        wait_until(lambda: watch.is_cancelled(8), what="the word of the cancellation")
        assert not watch.is_cancelled(9)
        assert watch.is_cancelled(8)
    finally:
        watch.stop()


OTHER_HOST = """
import os, sys
import torch.distributed as dist
from types import SimpleNamespace
from services.runtime.failures.peer_watch import PeerWatch
from services.runtime.context import Members
from services.runtime.failures.record import Failure, write_failure
from splitppo.rpc.errors import Place
from splitppo.v1 import worker_pb2

store = dist.HashStore()
processes = [worker_pb2.Process(rank=0, pid=os.getpid(), host="one"), worker_pb2.Process(rank=1, pid=1, host="two")]
members = Members(processes, (0,), {0: "10.0.0.1", 1: "10.0.0.2"})
watch = PeerWatch(SimpleNamespace(rank=0, role_name="actor"), store, members)
watch.on_failure = lambda error: print(error, flush=True)
if len(sys.argv) > 1:
    write_failure(store, Failure(1, sys.argv[1]))
    write_failure(store, Failure(0, "said later"))
watch.end_group(RuntimeError("gloo: Connection closed by peer [10.0.0.2]:4242"), Place())
"""


@pytest.mark.parametrize(
    ("recorded", "sentence"),
    [
        (["was ended by SIGKILL"], "rank 1 on two failed: was ended by SIGKILL; the group ends"),
        ([], "a peer rank died or cannot be reached, perhaps rank 1 on two (gloo: Connection closed by peer"),
    ],
)
def test_what_happens_on_another_host_is_told_with_its_name(recorded: list[str], sentence: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", OTHER_HOST, *recorded], capture_output=True, text=True, timeout=60, check=False
    )
    assert sentence in ended.stdout, ended.stderr
