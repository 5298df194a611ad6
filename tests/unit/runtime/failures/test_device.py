"""The report of a rank on the device that it computes on."""

from __future__ import annotations

import pytest
import torch

from services.runtime.failures.device import device_watch


def test_a_rank_on_the_cpu_says_how_much_main_memory_is_free() -> None:
    state = device_watch(torch.device("cpu"))()
    assert state.name == "CPU"
    assert 0 < state.free_bytes <= state.total_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_rank_on_a_gpu_says_what_cuda_says() -> None:
    state = device_watch(torch.device("cuda", 0))()
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    assert state.name == torch.cuda.get_device_name(0)
    assert abs(state.total_bytes - total_bytes) < total_bytes / 20
    assert abs(state.free_bytes - free_bytes) < total_bytes / 20
