"""The report of a rank on the device that it computes on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from services.runtime.failures.device import device_watch
from tests.support.fake_gpus import put_gpus


def test_a_rank_on_the_cpu_says_how_much_main_memory_is_free() -> None:
    state = device_watch(torch.device("cpu"))()
    assert state.name == "CPU"
    assert 0 < state.free_bytes <= state.total_bytes


@pytest.mark.parametrize(("uuid", "name"), [("2", "H100, GPU 2 of nvidia-smi"), ("part", "H100, GPU-part")])
def test_the_first_gpu_of_one_group_is_told_from_that_of_another(
    monkeypatch: pytest.MonkeyPatch, uuid: str, name: str
) -> None:
    put_gpus(monkeypatch, [80 << 30] * 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="H100", uuid=uuid))
    assert device_watch(torch.device("cuda", 0))().name == name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_rank_on_a_gpu_says_what_cuda_says() -> None:
    state = device_watch(torch.device("cuda", 0))()
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    assert state.name.startswith(f"{torch.cuda.get_device_name(0)}, GPU")
    assert abs(state.total_bytes - total_bytes) < total_bytes / 20
    assert abs(state.free_bytes - free_bytes) < total_bytes / 20
