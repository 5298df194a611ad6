"""Builds the vLLM engine, with arguments (vllm.EngineArgs) for a configuration and a device."""

import os
from typing import Any

import torch

from services.engine.model.loading import resolve_folder
from services.rollout.vllm_backend.checks import kv_cache_bytes, log_probs_mode, max_model_len
from services.rollout.vllm_backend.process import import_vllm, kept_random_state, whatever_is_free
from splitppo.config import Config
from splitppo.config_error import sentence_of
from splitppo.images.settings import ImageSettings
from splitppo.machine.heavy_imports import heavy_imports

# At its start vLLM wants the share gpu_memory_utilization of a GPU to be free, also if the size of the KV cache is
# given and nothing else follows from the share. Another group may have its memory there.
_NO_SHARE = 1e-3


def build_engine(
    config: Config, device: torch.device, *, has_texts: bool, image_settings: ImageSettings | None = None
) -> Any:
    """Builds the vLLM engine of this rank, without the policy's weights; the ranks of an engine call it together.

    `has_texts`: texts end a response. `image_settings`: how the policy reads images, if it does.

    Raises:
        ValueError: vLLM refuses the configuration; the message is one sentence. Every other error is a failure.
    """
    vllm = import_vllm()
    with heavy_imports():
        from vllm.v1.engine.llm_engine import LLMEngine

        if image_settings is not None:
            from services.rollout.vllm_backend.images import serve_images

            serve_images(image_settings, max_model_len(config))

    reads_images = image_settings is not None
    arguments = vllm.EngineArgs(**engine_arguments(config, device, has_texts=has_texts, reads_images=reads_images))
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # the GPU that vLLM computes on; torchrun's may be another
    with kept_random_state():
        try:
            engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
        except ValueError as error:  # also pydantic's
            raise ValueError(f"vLLM refuses the rollout (rollout.vllm): {sentence_of(error)}") from error
    if arguments.enable_sleep_mode:
        worker = engine.model_executor.driver_worker.worker
        worker.sleep = whatever_is_free(worker.sleep)
    return engine


def sleeps(config: Config, device: torch.device) -> bool:
    """Returns True if the engine gives memory of its device back while it does not generate."""
    return device.type == "cuda" and config.rollout.vllm.sleep_level != 0


def engine_arguments(
    config: Config, device: torch.device, *, has_texts: bool, reads_images: bool = False
) -> dict[str, Any]:
    """Returns the keyword arguments of vllm.EngineArgs; if texts end a response, vLLM must decode its tokens."""
    settings = config.rollout.vllm
    cache_bytes = kv_cache_bytes(config)
    head = {"head_dtype": "float32"} if config.actor.has_fp32_head else {}
    return {
        "model": str(resolve_folder(config.actor.model)),
        "tokenizer": config.data.tokenizer,
        "skip_tokenizer_init": not has_texts,
        "hf_overrides": {**config.actor.override_config, **head},
        "generation_config": "vllm",  # the folder's sampling parameters are not used
        "load_format": "dummy",  # the policy's weights come by sync_weights
        "dtype": "float32" if config.actor.dtype == "fp32" else "bfloat16",
        "seed": 0,  # every response has its own
        "max_model_len": max_model_len(config),
        "tensor_parallel_size": settings.tensor_model_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "kv_cache_memory_bytes": cache_bytes,
        "gpu_memory_utilization": settings.gpu_memory_utilization if cache_bytes is None else _NO_SHARE,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": _max_num_batched_tokens(config),
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enforce_eager": settings.enforce_eager or device.type == "cpu",
        "enable_sleep_mode": sleeps(config, device),
        "logprobs_mode": log_probs_mode(config),
        "disable_log_stats": True,
        **(_image_arguments(device) if reads_images else {}),
    }


def _image_arguments(device: torch.device) -> dict[str, Any]:
    """Returns the further arguments for a model that reads images, whose pixels come from us."""
    return {
        "mm_device_do_normalize": False,  # else the model normalises pixels that are normalised already
        "mm_processor_cache_gb": 0,  # of a processor that never runs
        # On a GPU vLLM measures how much memory the largest images take. On a CPU it measures nothing, and the size of
        # the KV cache is given.
        "skip_mm_profiling": device.type == "cpu",
    }


def _max_num_batched_tokens(config: Config) -> int:
    """Limits the configured max_num_batched_tokens: at most all rows at full length, at least a token per row."""
    settings = config.rollout.vllm
    longest = max_model_len(config)
    least = 0 if settings.enable_chunked_prefill else longest
    most = settings.max_num_seqs * longest
    return max(min(settings.max_num_batched_tokens, most), least, settings.max_num_seqs)
