"""A stand-in for `pynvml` that shows GPUs on machines without any, as far as splitppo/machine/gpus.py calls it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

UUID = "GPU-{}"


def put_gpus(monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int | None] | None) -> None:
    """Replaces `pynvml` by a module with GPUs of so many bytes, half of them free, with the uuids 0, 1, ...

    The process may use all of them.

    None instead of a number is a GPU that shares the machine's memory; None instead of all numbers: no driver.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", _FakeNvml(sizes))


class NVMLError(Exception):
    """The error of NVML for a question that it cannot answer."""


class _FakeNvml(ModuleType):
    NVMLError = NVMLError

    def __init__(self, sizes: Sequence[int | None] | None) -> None:
        super().__init__("pynvml")
        self._sizes = sizes
        self._is_initialized = False

    def nvmlInit(self) -> None:
        if self._sizes is None:
            raise NVMLError("NVML Shared Library Not Found")
        self._is_initialized = True

    def nvmlDeviceGetCount(self) -> int:
        return len(self._known())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return range(len(self._known()))[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        uuids = [UUID.format(index) for index in range(len(self._known()))]
        if uuid not in uuids:
            raise NVMLError("Not Found")
        return uuids.index(uuid)

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return UUID.format(handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        total = self._known()[handle]
        if total is None:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=total, free=total // 2, used=total - total // 2)

    def _known(self) -> Sequence[int | None]:
        if self._sizes is None or not self._is_initialized:
            raise NVMLError("Uninitialized")
        return self._sizes
