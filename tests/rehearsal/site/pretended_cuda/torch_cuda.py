"""Makes torch.cuda of a CPU build work with the pretended device.

Where torch.cuda calls a function of its C++ part, that function is given, so that the Python of torch.cuda runs as
ever: it initialises lazily, refuses forks, and counts devices. Streams and events are torch's for any device.
"""

from __future__ import annotations

import os
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import cuda
from torch.utils._python_dispatch import _disable_current_modes

NAME = os.environ.get("REHEARSAL_GPU_NAME", "pretended")


def install() -> None:
    """Makes torch.cuda see the device."""
    for name, function in _c_functions().items():
        setattr(torch._C, name, function)
    torch.version.cuda = "13.0"
    cuda._cudart = SimpleNamespace()
    cuda._queued_calls.clear()  # they ask which kernels the build has
    cuda._exchange_device = cuda._maybe_exchange_device = torch._C._cuda_exchangeDevice
    cuda._get_device_properties = _properties
    cuda.mem_get_info = cuda.memory.mem_get_info = _mem_get_info
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.current_stream = _current_stream
    cuda.default_stream = lambda device=None: Stream.of(_index(device), 0)
    cuda.set_stream = torch._C._accelerator_setStream
    cuda.stream = cuda.StreamContext = _StreamContext
    torch.UntypedStorage.resize_ = _resizing(torch.UntypedStorage.resize_)


class Stream(torch.Stream):
    """A stream of a device: an order of work that runs at once."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        if given:
            return super().__new__(cls, priority=priority, **given)
        return super().__new__(cls, torch.device("cuda", _index(device)), priority=priority)

    @classmethod
    def of(cls, index: int, stream_id: int) -> Stream:
        """Returns the stream of a device that has this id."""
        return cls(stream_id=stream_id, device_index=index, device_type=1)

    @property
    def cuda_stream(self) -> int:
        """What a kernel would be given."""
        return self.stream_id


class Event(torch.Event):
    """An event, which has happened when it is recorded."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing)


def _current_stream(device: Any = None) -> Stream:
    index = _index(device)
    return Stream.of(index, torch._C._accelerator_getStream(index).stream_id)


class _StreamContext:
    """Makes a stream the current one within a `with` block; like torch's, it may be entered again."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = torch._C._accelerator_getStream(self._stream.device_index)
            torch._C._accelerator_setStream(self._stream)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._stream is not None:
            torch._C._accelerator_setStream(self._before)


def _c_functions() -> dict[str, Any]:
    """Returns the functions of torch's C++ part that torch.cuda calls."""
    ops = torch.ops.rehearsal

    def initialise() -> None:
        with _disable_current_modes():  # the sanitizer's would ask for the current stream, which initialises
            ops.initialise()
            cuda.default_generators = tuple(map(ops.default_generator, range(len(ops.visible_gpus()))))

    def exchange(index: int) -> int:
        before = ops.current_device()
        if index >= 0:
            ops.set_device(index)
        return before

    def memory_stats(index: int) -> dict[str, Any]:
        now, peak = ops.taken(index)
        taken = {"all": {"current": now, "peak": peak}}
        return {"allocated_bytes": taken, "reserved_bytes": taken}

    return {
        "_cuda_init": initialise,
        "_cuda_isInBadFork": ops.is_in_bad_fork,
        "_cuda_getDeviceCount": lambda: len(ops.visible_gpus()),
        "_cuda_getDevice": ops.current_device,
        "_cuda_setDevice": ops.set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_synchronize": ops.synchronize,
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": ops.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda index: None,
        "_cuda_emptyCache": lambda: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_getCurrentRawStream": lambda index: torch._C._accelerator_getStream(index).stream_id,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getArchFlags": lambda: "sm_90",
    }


def _index(device: Any) -> int:
    """Returns the index of a device, a device's name or an index; the current device for none."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return cuda.current_device() if index is None else index


def _properties(index: int) -> SimpleNamespace:
    ops = torch.ops.rehearsal
    return SimpleNamespace(
        name=NAME,
        total_memory=ops.bytes_of_gpu(),
        uuid=ops.uuid(ops.visible_gpus()[index]),
        major=9,
        minor=0,
        multi_processor_count=132,
        L2_cache_size=50 << 20,
    )


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    total = torch.ops.rehearsal.bytes_of_gpu()
    return total - torch.ops.rehearsal.taken(_index(device))[0], total


def _resizing(resize_on_cpu: Any) -> Any:
    """Returns torch's function that resizes a storage, for storages of the device too."""

    def resize_(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resize_on_cpu(storage, num_bytes)
        of_storage = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        torch.ops.rehearsal.resize_storage(of_storage, num_bytes)
        return storage

    return resize_
