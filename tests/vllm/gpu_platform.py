"""Builds vLLM's whole configuration as on an H100, on a machine without a GPU; a test runs it as a process.

It reads one JSON list of overrides per line of standard input, and writes a line of JSON for each configuration: what
vLLM makes of it. A last line has what the backend raises for each of `ERRORS` of vLLM.
vLLM's CUDA platform is the one of the package for CPUs, with what it would ask a driver answered here; no kernel runs.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import torch

from services.rollout.vllm_backend.engine import build_engine, engine_arguments
from services.rollout.vllm_backend.process import import_vllm
from splitppo.config import Config, load_config

KERNELS = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.vllm_flash_attn")


def pretend_h100() -> None:
    """Makes vLLM believe that it computes on H100s, of which it asks nothing but what is answered here."""
    for name in KERNELS:
        sys.modules[name] = _Kernels(name)
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):  # type: ignore[misc,valid-type]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return True

        @classmethod
        def import_kernels(cls) -> None:
            pass

        def is_cumem_allocator_available(self) -> bool:
            return True

    platforms._current_platform = H100()
    import vllm.config.vllm as vllm_config  # now: its modules take the platform over as they are imported

    vllm_config.HAS_TRITON = True


class _Kernels(types.ModuleType):
    """A module of compiled kernels, none of which is called."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def facts_of(vllm: Any, config: Config) -> dict[str, Any]:
    """Returns what vLLM makes of the arguments for a configuration: its own words for what the engine will do."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(config.rollout.vllm.tensor_model_parallel_size))
    arguments = engine_arguments(config, torch.device("cuda", 0), has_texts=False)
    made = vllm.EngineArgs(**arguments).create_engine_config()
    return {
        "is_stateless": made.use_v2_model_runner,  # its sampler draws by seed and position
        "sleeps": made.model_config.enable_sleep_mode,
        "has_pool": made.model_config.enable_cumem_allocator,
        "dtype": str(made.model_config.dtype),
        "head_dtype": str(made.model_config.head_dtype),
        "logprobs": made.model_config.logprobs_mode,
        "max_model_len": made.model_config.max_model_len,
        "max_num_batched_tokens": made.scheduler_config.max_num_batched_tokens,
        "executor": made.parallel_config.distributed_executor_backend,
        "ranks": made.parallel_config.world_size,
        "kv_cache_bytes": made.cache_config.kv_cache_memory_bytes,
        "share": made.cache_config.gpu_memory_utilization,
        "prefixes": made.cache_config.enable_prefix_caching,
        "graphs": made.compilation_config.cudagraph_mode.name,
        "loads": made.load_config.load_format,
        "device": str(made.device_config.device),
    }


def raised_at_start(config: Config, error: Exception) -> list[str]:
    """Returns type and text of what the backend raises if vLLM raises `error` while it builds the engine."""
    from vllm.v1.engine.llm_engine import LLMEngine

    def fail(*_: Any, **__: Any) -> None:
        raise error

    LLMEngine.from_engine_args = fail
    try:
        build_engine(config, torch.device("cuda", 0), has_texts=False)
    except (ValueError, RuntimeError, AssertionError) as raised:
        return [type(raised).__name__, str(raised)]
    raise AssertionError("the engine was built")


ERRORS = (
    ValueError("Free memory on device cuda:0 (1.0/80.0 GiB)\n on startup is less than desired"),
    RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:145"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    AssertionError("Error in memory profiling. Initial free memory 10.0 GiB, current free memory 12.0 GiB"),
)


def main(config_file: Path) -> None:
    pretend_h100()
    vllm = import_vllm()
    for line in sys.stdin:
        sys.stdout.write(f"{json.dumps(facts_of(vllm, load_config(config_file, json.loads(line))))}\n")
    sys.stdout.write(f"{json.dumps([raised_at_start(load_config(config_file), error) for error in ERRORS])}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
