"""The pretended device has the rules of a real one: what a GPU refuses, it refuses, with a message that says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from splitppo.machine.gpus import memory_reader, total_bytes_of_gpus

PRETENDED = "REHEARSAL_LIBRARY" in os.environ
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not PRETENDED, reason="needs the pretended CUDA device: make rehearse-gpu"),
]
MIXED = "Expected all tensors to be on the same device"


def on_device(*sizes: int, index: int = 0) -> torch.Tensor:
    return torch.ones(*sizes, device=torch.device("cuda", index))


def in_new_process(source: str, **variables: str) -> str:
    """The output of a Python program that has the device, too."""
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_tensors_of_several_devices_are_refused() -> None:
    for other in (torch.ones(3), on_device(3, index=1)):
        for mix in (torch.add, torch.dot, torch.maximum):
            with pytest.raises(RuntimeError, match=MIXED):
                mix(on_device(3), other)
    with pytest.raises(RuntimeError, match=MIXED):
        torch.cat([on_device(3), torch.ones(3)])
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        torch.ones(3)[torch.tensor([0], device="cuda")]
    with pytest.raises(RuntimeError, match=MIXED):
        on_device(3)[torch.tensor([0, 1])] = torch.ones(2)


def test_a_single_number_may_be_on_the_cpu_and_so_may_indices() -> None:
    assert (on_device(3) * torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0]
    assert on_device(3)[torch.tensor([0, 1])].tolist() == [1.0, 1.0]


def test_a_device_that_is_not_there_is_refused() -> None:
    for index in (torch.cuda.device_count(), 40):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            on_device(1, index=index)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.set_device(index)


def test_memory_that_was_not_written_is_nan() -> None:
    assert torch.empty(5, device="cuda").isnan().all()
    assert torch.empty(5, device="cuda", dtype=torch.bfloat16).isnan().all()


def test_memory_is_counted_by_device_in_blocks_and_ends() -> None:
    before = [torch.cuda.memory_allocated(index) for index in (0, 1)]
    torch.cuda.reset_peak_memory_stats(1)
    gone = on_device(1000, index=1)
    del gone
    kept = on_device(10, index=1)
    assert kept.untyped_storage().nbytes() == 40
    assert [torch.cuda.memory_allocated(index) for index in (0, 1)] == [before[0], before[1] + 512]
    assert torch.cuda.max_memory_allocated(1) == before[1] + 4096
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(1 << 40, device="cuda")


def test_views_share_memory_and_copies_do_not() -> None:
    whole = on_device(2, 3)
    whole[1].mul_(2)
    assert whole.tolist() == [[1.0] * 3, [2.0] * 3]
    assert whole.cpu().device == torch.device("cpu")
    whole.cpu().zero_()
    assert whole.sum().item() == 9.0


def test_gradients_flow_through_the_device_and_arrive_on_it() -> None:
    weight = torch.ones(3, 3, device="cuda:1", requires_grad=True)
    (weight @ on_device(3, 2, index=1)).square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.device == torch.device("cuda", 1)
    assert weight.grad.tolist() == [[12.0] * 3] * 3


def test_a_generator_of_the_cpu_is_refused_and_the_devices_own_is_restored() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3, device="cuda")
    of_cpu = torch.get_rng_state()
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert torch.equal(torch.get_rng_state(), of_cpu)


def test_a_stream_is_the_current_one_within_its_block() -> None:
    stream, default = torch.cuda.Stream(), torch.cuda.current_stream()
    with torch.cuda.stream(stream), torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        stream.wait_stream(default)
    assert torch.cuda.current_stream() == default != stream


VISIBLE = {
    "2,0": ["2", "0"],
    "GPU-00000000-0000-0000-0000-000000000003,1": ["3", "1"],
    "1,9,2": ["1"],
    "": [],
}


def test_a_process_that_only_imports_torch_may_be_forked_and_sees_what_its_environment_names_then() -> None:
    source = f"""
import os, torch
def forked(run):
    if not (pid := os.fork()):
        try:
            print(run(), flush=True)
        except RuntimeError as error:
            print(str(error)[:48], flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
def uuids():
    return [torch.cuda.get_device_properties(index).uuid[-1] for index in range(torch.cuda.device_count())]
print(len(os.listdir("/proc/self/task")), flush=True)
for visible in {[*VISIBLE]}:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    forked(uuids)
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
torch.ones(1, device="cuda")
forked(lambda: torch.ones(1, device="cuda"))
"""
    seen = [str(uuids) for uuids in VISIBLE.values()]
    refusal = "Cannot re-initialize CUDA in forked subprocess."
    assert in_new_process(source).splitlines() == ["1", *seen, refusal]


def test_a_program_on_pretended_gpus_sees_those_that_its_caller_lets_it_see() -> None:
    count = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid[-1])"
    command = [sys.executable, "-m", "tests.rehearsal", "--exec", "-c", count]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "2,3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "2"]


def test_nvml_shows_the_gpus_of_the_machine() -> None:
    assert total_bytes_of_gpus() == dict.fromkeys(range(int(os.environ["REHEARSAL_GPUS"])), 80 << 30)
    uuid = torch.cuda.get_device_properties(1).uuid
    assert memory_reader(str(uuid))().total == 80 << 30


@pytest.fixture
def group(tmp_path: Path) -> dist.ProcessGroup:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_collective_takes_tensors_of_one_device_contiguous_and_of_a_known_type(group: dist.ProcessGroup) -> None:
    tensor = on_device(4)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    assert tensor.tolist() == [1.0] * 4
    for wrong, message in [
        (on_device(4, 4).T[:3], "must be contiguous"),
        (on_device(4).to(torch.int16), "not supported for NCCL"),
        (on_device(4, index=1), "communicates on cuda:0"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            dist.all_reduce(wrong)
    with pytest.raises(RuntimeError, match="must be CUDA and dense"):
        dist.all_gather_into_tensor(torch.empty(4), on_device(4))


# Two streams change the same memory; prints what the second one may do before, and what it may not.
TWO_STREAMS = """
import torch
from torch.cuda._sanitizer import CUDASanitizerErrors
first, second = torch.cuda.Stream(), torch.cuda.Stream()
ways = {
    "wait_stream": lambda: second.wait_stream(first),
    "wait_event": lambda: second.wait_event(first.record_event()),
    "stream.synchronize": lambda: first.synchronize(),
    "event.synchronize": lambda: first.record_event().synchronize(),
    "torch.cuda.synchronize": lambda: torch.cuda.synchronize(),
    "nothing": lambda: None,
}
for way, wait in ways.items():
    values = torch.zeros(100, device="cuda")
    first.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(first):
        values.add_(1)
    wait()
    try:
        with torch.cuda.stream(second):
            values.add_(1)
        print(way, "in order")
    except CUDASanitizerErrors:
        print(way, "a race")
"""


def test_the_sanitizer_of_torch_knows_which_streams_wait_for_each_other() -> None:
    ways = ("wait_stream", "wait_event", "stream.synchronize", "event.synchronize", "torch.cuda.synchronize")
    assert in_new_process(TWO_STREAMS, TORCH_CUDA_SANITIZER="1").splitlines() == [
        *(f"{way} in order" for way in ways),
        "nothing a race",
    ]
