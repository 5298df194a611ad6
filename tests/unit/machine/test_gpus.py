"""The memory of this machine's GPUs, as NVML reports it."""

from __future__ import annotations

import pytest

from splitppo.machine.gpus import GpuMemory, memory_reader, total_bytes_of_gpus
from tests.support.fake_gpus import put_gpus


def test_gpus_have_the_indices_of_nvml_and_one_without_memory_of_its_own_has_0_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_gpus(monkeypatch, [80 << 30, None, 40 << 30])
    assert total_bytes_of_gpus() == {0: 80 << 30, 1: 0, 2: 40 << 30}


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpus(monkeypatch, [80 << 30, None])
    assert memory_reader("0")() == GpuMemory(free=40 << 30, total=80 << 30)
    assert memory_reader("1")() == memory_reader("2")() == GpuMemory(0, 0)


@pytest.mark.parametrize("sizes", [None, []], ids=["no driver", "no GPU"])
def test_where_there_is_no_gpu_nothing_is_known(monkeypatch: pytest.MonkeyPatch, sizes: list[int] | None) -> None:
    put_gpus(monkeypatch, sizes)
    assert total_bytes_of_gpus() == {}
    assert memory_reader("0")() == GpuMemory()


def test_the_library_itself_answers_here_too() -> None:
    assert all(size >= 0 for size in total_bytes_of_gpus().values())
