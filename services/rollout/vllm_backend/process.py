"""Imports vLLM into a process that trains: sets its environment before the import, and patches it afterwards.

Written for vLLM 0.32 (pinned in pyproject.toml). All changes of vLLM's modules are in `_adapt`, with the reason, and
for images in images.py.
"""

import ctypes
import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from splitppo.machine.heavy_imports import heavy_imports

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core runs in this process and dies with it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # services.*.cpus and threads say where this process computes
    "VLLM_CONFIGURE_LOGGING": "0",  # its records go where ours go
    # On a CPU each weight sync has all matrix products compiled anew, and the last 1024 would stay in memory, 0.3 GB
    # after a hundred steps of the quickstart. The engine keeps those that it uses itself.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent anywhere
    "DO_NOT_TRACK": "1",
}
# Each weight sync frees the weights that vLLM has packed and packs them anew, and generation needs other blocks than
# training. A heap that keeps all freed memory (services/runtime/group/closed_group.py) would grow for many steps.
_M_TRIM_THRESHOLD = -1  # of glibc's mallopt
_KEPT_BYTES = 64 << 20
MORE_IN_USE = "Memory usage increased after sleeping."  # of vllm/v1/worker/gpu_worker.py


def import_vllm() -> Any:
    """Imports the package vllm with the settings and patches of this file; called in place of `import vllm`."""
    os.environ.update(_ENVIRONMENT)
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    with kept_random_state(), heavy_imports():
        import vllm

        _quieten()
        _adapt()
    return vllm


def _quieten() -> None:
    """Limits vLLM's log to warnings and errors, and drops warnings about modules without weights to reload."""
    logging.getLogger("vllm").setLevel(logging.WARNING)
    reload = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    without_weights = {"RotaryEmbedding", "MRotaryEmbedding", "ParallelLMHead"}
    reload.addFilter(lambda record: not set(map(str, record.args or ())) & without_weights)


def _adapt() -> None:
    """Replaces two functions of vLLM: one would need a C++ compiler, the other survives the death of a rank badly."""
    from vllm.distributed.device_communicators import cpu_communicator
    from vllm.v1.sample import sampler

    # The function counts the rank of each sampled token, which nobody reads. vLLM would compile the function in every
    # process, for some seconds, by a C++ compiler that must be installed.
    sampler.batched_count_greater_than = lambda logprobs, _: torch.zeros(
        len(logprobs), dtype=torch.int64, device=logprobs.device
    )
    # Tensor parallelism on a CPU: shared memory of a fixed name outlives a killed rank, so that the next group cannot
    # start, and waiting in it never notices that a peer has died. Ranks that name it differently get gloo instead.
    cpu_communicator._CPUSHMDistributed.make_group_name = staticmethod(lambda own: f"{own.rank}")  # noqa: SLF001


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restores all random generators of the process after the `with` block: vLLM seeds them while it starts."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


def whatever_is_free(sleep: Callable[..., None]) -> Callable[..., None]:
    """Returns the `sleep` of a vLLM worker without its last assertion: that more memory of the GPU is free than before.

    Another group on the same GPU may have taken more meanwhile. vLLM would not know that it sleeps, and never wake up.
    """

    def sleep_whatever_is_free(level: int = 1) -> None:
        try:
            sleep(level)
        except AssertionError as error:
            if str(error) != MORE_IN_USE:
                raise

    return sleep_whatever_is_free


def forget_kernels(model: nn.Module) -> None:
    """Lets vLLM set up the kernels of MoE layers again when weights are reloaded next, on a CPU.

    There an MoE layer computes with packed weights. A reload packs them only while the layer has no kernel: otherwise
    the layer would compute with the new weights as if they were packed, and give wrong numbers.
    """
    from vllm.platforms import current_platform

    for module in model.modules() if current_platform.is_cpu() else ():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None  # type: ignore[union-attr]


def pack_heads(model: nn.Module) -> None:
    """Packs the new weights of vLLM output layers that are tied to the embedding, after a reload of weights.

    On a CPU vLLM multiplies with a packed copy of the weights. A reload does not pack those of a tied output layer
    again, because that layer has no weights of its own.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
