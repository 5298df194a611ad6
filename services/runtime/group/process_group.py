"""Lets a rank join its torchrun group: connects the store, creates process groups, sets device and CPU cores."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from services.runtime.context import Members, RankContext
from services.runtime.group.machine import own_address
from splitppo.config import Config, ConfigError, ServiceConfig
from splitppo.config.section import RoleName
from splitppo.v1 import worker_pb2

# A rank that is done waits in a collective for the slowest rank; the watch over peers notices a dead rank at once.
_MIN_GROUP_TIMEOUT_S = 1800.0
# While a command runs, rank 0 waits for parts and messages of the other ranks, and they for messages of callers.
_SIDE_TIMEOUT = timedelta(days=7)
_STORE_TIMEOUT = timedelta(seconds=60)
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class Launch:
    """The rank, node, group sizes and store address of a process, from the environment variables of torchrun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    restart: str
    store_host: str
    store_port: int
    hosts_store: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Launch":
        """Reads a Launch from torchrun's environment variables; ConfigError in a process outside of torchrun."""
        try:
            rank = int(environment["RANK"])
            return cls(
                rank=rank,
                world_size=int(environment["WORLD_SIZE"]),
                local_rank=int(environment["LOCAL_RANK"]),
                local_world_size=int(environment["LOCAL_WORLD_SIZE"]),
                node=int(environment.get("GROUP_RANK", "0")),
                restart=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
                store_host=environment["MASTER_ADDR"],
                store_port=int(environment["MASTER_PORT"]),
                hosts_store=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            )
        except KeyError as error:
            start = "python -m services.ROLE --config FILE, or torchrun"
            raise ConfigError(f"environment variable {error.args[0]} is missing: start this with {start}") from error

    def connect_store(self, *, may_host: bool = True) -> Store:
        """Connects a new client to the torchrun group's store; its keys get a prefix for this start of the group."""
        store = dist.TCPStore(  # type: ignore[attr-defined]
            self.store_host,
            self.store_port,
            is_master=self.hosts_store and may_host,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
        )
        return PrefixStore(f"splitppo/{self.restart}", store)


def place_process(launch: Launch, role_name: RoleName, service: ServiceConfig, num_threads: int) -> torch.device:
    """Binds this process to its CPU cores and GPU and returns its device; ConfigError if the machine lacks them."""
    if cpus := cpus_of_rank(service.cpus, launch.local_rank, launch.local_world_size):
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            raise ConfigError(f"services.{role_name}.cpus: this machine does not offer cores {sorted(cpus)}") from error
    torch.set_num_threads(num_threads)
    if not service.devices:
        return torch.device("cpu")
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order of nvidia-smi, not the fastest first
    index = gpu_of_rank(f"services.{role_name}.devices", service.devices, launch, torch.cuda.device_count())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def use_expandable_segments() -> None:
    """Lets blocks of GPU memory that PyTorch keeps grow, unless the user has configured PyTorch's allocator.

    Where a process computes batches of ever other shapes, gaps would remain in blocks of a fixed size that fit no later
    batch.
    """
    if os.environ.keys().isdisjoint(_ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # noqa: SLF001 - has no public name


def gpu_of_rank(key: str, devices: Sequence[int], launch: Launch, num_visible: int) -> int:
    """Returns the CUDA index of a rank's GPU among the GPUs that its process sees; ConfigError without such a GPU.

    `devices` is the value of `key`.

    A process that sees as many GPUs as its node has ranks sees the GPUs of its group alone (CUDA_VISIBLE_DEVICES, a
    container), and counts them from 0. A process that sees more GPUs takes the index from `devices`.
    """
    if len(devices) < launch.local_world_size:
        raise ConfigError(f"{key} lists {len(devices)} GPUs for {launch.local_world_size} ranks")
    index = launch.local_rank if num_visible == launch.local_world_size else devices[launch.local_rank]
    if index >= num_visible:
        raise ConfigError(
            f"{key} is {list(devices)}, but this machine offers {num_visible} GPUs;"
            " leave it empty to compute on the CPU"
        )
    return index


def cpus_of_rank(cpus: tuple[int, ...], local_rank: int, local_world_size: int) -> set[int]:
    """Returns a rank's equal slice of the node's CPU cores; all cores if they cannot be divided equally."""
    if not cpus or len(cpus) % local_world_size:
        return set(cpus)
    num_cpus = len(cpus) // local_world_size
    return set(cpus[local_rank * num_cpus : (local_rank + 1) * num_cpus])


def join_group(launch: Launch, store: Store, role_name: RoleName, config: Config, device: torch.device) -> RankContext:
    """Creates the process groups of a rank (default: compute; control; side) and returns them in a RankContext."""
    timeout = timedelta(seconds=max(_MIN_GROUP_TIMEOUT_S, 2 * config.services.progress_timeout_s))
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device if is_cuda else None,
    )
    control_group = dist.new_group(backend="gloo", timeout=timeout)
    side_group = dist.new_group(backend="gloo", timeout=_SIDE_TIMEOUT) if launch.world_size > 1 else None
    return RankContext(role_name, launch.rank, launch.world_size, device, control_group, config, side_group)


def introduce(launch: Launch, store: Store) -> Members:
    """Writes this rank's pid, host and address to the store, and reads those of all ranks; all ranks call it."""
    several = launch.world_size > launch.local_world_size
    address = own_address(launch.store_host) if several else ""
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "node": launch.node, "address": address}
    store.set(f"process/{launch.rank}", json.dumps(mine))
    ranks = [json.loads(store.get(f"process/{rank}")) for rank in range(launch.world_size)]
    return Members(
        tuple(worker_pb2.Process(rank=rank, pid=row["pid"], host=row["host"]) for rank, row in enumerate(ranks)),
        tuple(rank for rank, row in enumerate(ranks) if row["node"] == launch.node),
        {rank: row["address"] for rank, row in enumerate(ranks)} if several else {},
    )
