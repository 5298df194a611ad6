"""The memory of this machine's GPUs, as NVML reports it."""

from __future__ import annotations

import sys

import pytest

from splitppo.config_error import ConfigError
from splitppo.machine.gpus import (
    GpuMemory,
    check_offered,
    memory_reader,
    name_in_nvidia_smi,
    total_bytes_of_gpus,
    visible_devices,
)
from splitppo.our_commands import our_python
from tests.support.fake_gpus import put_gpus


def test_gpus_have_the_indices_of_nvml_and_one_without_memory_of_its_own_has_0_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_gpus(monkeypatch, [80 << 30, None, 40 << 30])
    assert total_bytes_of_gpus() == {0: 80 << 30, 1: 0, 2: 40 << 30}


@pytest.mark.parametrize(
    ("listed", "sizes"),
    [
        ("2,0", {0: 40, 1: 80}),
        (" 1 , GPU-2 ", {0: 60, 1: 40}),
        ("GPU-1", {0: 60}),
        ("MIG-5,0", {0: 0, 1: 80}),  # a part of a GPU, whose memory is not known here
        ("1,-1,2", {0: 60}),  # CUDA ends the list at an entry that is no GPU
        ("0,7,2", {0: 80}),
        ("", {}),
        ("NoDevFiles", {}),
    ],
)
def test_gpus_are_counted_in_the_list_of_those_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, listed: str, sizes: dict[int, int]
) -> None:
    put_gpus(monkeypatch, [80 << 30, 60 << 30, 40 << 30])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert total_bytes_of_gpus() == {index: size << 30 for index, size in sizes.items()}


@pytest.mark.parametrize(
    ("listed", "devices", "seen"),
    [
        (None, [0, 3], "0,3"),
        ("4,5,6,7", [0, 3], "4,7"),
        ("GPU-ab, MIG-GPU-cd/1/0", [1, 0], "MIG-GPU-cd/1/0,GPU-ab"),
        ("4,5", [], ""),
        (None, [], ""),
    ],
)
def test_a_group_sees_its_own_of_the_gpus_that_the_controller_may_use(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, devices: list[int], seen: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_devices("services.actor.devices", devices) == seen


@pytest.mark.parametrize(
    ("listed", "offers"),
    [
        ("4,5", "CUDA_VISIBLE_DEVICES=4,5 offers 2 GPUs: devices are places in that list, here from 0 to 1"),
        ("4,-1,5", "CUDA_VISIBLE_DEVICES=4,-1,5 offers 1 GPUs: devices are places in that list, here from 0 to 0"),
        ("", "CUDA_VISIBLE_DEVICES= offers 0 GPUs"),
    ],
)
def test_a_number_outside_of_the_list_is_refused_with_the_list(
    monkeypatch: pytest.MonkeyPatch, listed: str, offers: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    with pytest.raises(ConfigError) as refused:
        visible_devices("services.critic.devices", [0, 4])
    assert str(refused.value) == (
        f"services.critic.devices is [0, 4], but {offers}; leave services.critic.devices empty to compute on the CPU"
    )


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        ([4, 5], "CUDA_VISIBLE_DEVICES=4,5,6,7 offers 4 GPUs: devices are places in that list, here from 0 to 3"),
        ([0, 1], "of the GPUs in CUDA_VISIBLE_DEVICES=4,5,6,7 this machine has none"),
    ],
)
def test_numbers_of_nvidia_smi_are_told_from_places_also_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, devices: list[int], problem: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    with pytest.raises(ConfigError, match=problem):
        check_offered("services.actor.devices", devices, num_gpus=0)


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpus(monkeypatch, [80 << 30, None])
    assert memory_reader("0")() == GpuMemory(free=40 << 30, total=80 << 30)
    assert memory_reader("1")() == memory_reader("2")() == GpuMemory(0, 0)


@pytest.mark.parametrize("sizes", [None, []], ids=["no driver", "no GPU"])
def test_where_there_is_no_gpu_nothing_is_known(monkeypatch: pytest.MonkeyPatch, sizes: list[int] | None) -> None:
    put_gpus(monkeypatch, sizes)
    assert total_bytes_of_gpus() == {}
    assert memory_reader("0")() == GpuMemory()


def test_without_the_library_of_nvml_nothing_is_known_and_devices_are_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    caplog.set_level("INFO")
    assert total_bytes_of_gpus() == {}
    assert memory_reader("0")() == GpuMemory()
    assert name_in_nvidia_smi("0") == "GPU-0"
    sentence = f"does not have the package pynvml: {our_python()} -m pip install 'splitppo[worker]'"
    assert [record.message.endswith(sentence) for record in caplog.records] == [True, True]
    with pytest.raises(ConfigError, match="the GPUs of this machine cannot be counted: ") as raised:
        check_offered("services.actor.devices", [0], num_gpus=0)
    assert sentence in str(raised.value)
    check_offered("services.actor.devices", [], num_gpus=0)


def test_the_library_itself_answers_here_too() -> None:
    assert all(size >= 0 for size in total_bytes_of_gpus().values())
