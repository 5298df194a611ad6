"""Checks that vLLM can run the configured model, KV cache and sampling, before any weight is loaded."""

import math
from typing import Any

from transformers import AutoConfig

from services.engine.model.loading import resolve_folder
from services.rollout.vllm_backend.process import import_vllm
from splitppo.config import Config

_GIB = 1 << 30
_MAX_TEMPERATURE = 2.0


def check_model(config: Config) -> None:
    """Checks that vLLM can run the configured model, KV cache and sampling; ValueError, one sentence, if not."""
    import_vllm()
    model = AutoConfig.from_pretrained(resolve_folder(config.actor.model))
    _check_architecture(config, model)
    _check_attention(config, model.get_text_config())
    check_temperature(config.rollout.temperature, "rollout.temperature")
    check_temperature(config.evaluation.temperature, "evaluation.temperature")
    _check_log_probs(config)


def max_model_len(config: Config) -> int:
    """Returns the largest number of tokens, a context with what is sampled in it, that the vLLM engine is built for."""
    return config.rollout.vllm.max_model_len or config.longest_context


def kv_cache_bytes(config: Config) -> int | None:
    """Returns the size in bytes of each rank's vLLM KV cache, which rollout.vllm.kv_cache_gb gives in GiB.

    Without that key it is 1 GiB on a CPU, and None on a GPU, where vLLM computes it from gpu_memory_utilization.
    """
    size_gb = config.rollout.vllm.kv_cache_gb
    if size_gb is None:
        return None if _on_gpu(config) else _GIB
    return int(size_gb * _GIB)


def log_probs_mode(config: Config) -> str:
    """Selects vLLM's logprobs_mode: log-probs of the raw logits, or after temperature, top-k and top-p.

    `Response` needs log-probs after temperature and before top-k and top-p. On a CPU `SeededSampler` computes them so.
    On a GPU, with a temperature other than 1 and with top-k or top-p, the log-probs are those after top-k and top-p.
    """
    return "raw_logprobs" if _cuts_on_gpu(config) and config.rollout.temperature == 1.0 else "processed_logprobs"


def check_temperature(temperature: float, name: str) -> None:
    """Raises ValueError, with the key `name`, for a temperature that vLLM does not take (over 2)."""
    if temperature > _MAX_TEMPERATURE:
        raise ValueError(f"vLLM takes temperatures of 0 to {_MAX_TEMPERATURE:g}, {name} is {temperature:g}")


def _check_architecture(config: Config, model: Any) -> None:
    """Raises ValueError if vLLM does not know any of the model's architectures."""
    from vllm import ModelRegistry

    architectures = model.architectures or []
    if not set(architectures) & set(ModelRegistry.get_supported_archs()):
        named = ", ".join(architectures) or f"no architecture, model_type {model.model_type!r}"
        raise ValueError(
            f"vLLM does not know the model of actor.model ({config.actor.model}: {named}); set rollout.backend to hf"
        )


def _check_attention(config: Config, model: Any) -> None:
    """Checks that vLLM on a CPU supports the attention head size, and that one sequence fits into the KV cache."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    num_heads = getattr(model, "num_attention_heads", None)
    if not isinstance(num_heads, int) or not num_heads:
        return  # no attention, or heads layer by layer
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // num_heads
    on_cpu = not _on_gpu(config)
    if on_cpu and head_dim not in (sizes := CPUAttentionBackend.get_supported_head_sizes()):
        raise ValueError(
            f"actor.model has attention heads of size {head_dim}, and vLLM on a CPU computes"
            f" {', '.join(map(str, sizes))} only; set rollout.backend to hf"
        )
    available = kv_cache_bytes(config)
    if available is None:
        return
    # One sequence has, in each layer, a key and a value for each position and each KV head of this rank.
    kv_heads = getattr(model, "num_key_value_heads", None) or num_heads
    block = 128 if on_cpu else 16  # tokens that are kept together
    positions = math.ceil(max_model_len(config) / block) * block
    rank_heads = max(1, kv_heads // config.rollout.vllm.tensor_model_parallel_size)
    value_bytes = 4 if config.actor.dtype == "fp32" else 2
    needed = 2 * model.num_hidden_layers * rank_heads * head_dim * positions * value_bytes
    if needed > available:
        raise ValueError(
            f"rollout.vllm.kv_cache_gb ({available / _GIB:.3g}) must hold one sequence of {max_model_len(config)}"
            f" tokens (rollout.vllm.max_model_len), which takes {needed / _GIB:.3g} GiB; raise rollout.vllm.kv_cache_gb"
        )


def _on_gpu(config: Config) -> bool:
    return any(config.services.of(role).devices for role in config.sampling_roles)


def _cuts_on_gpu(config: Config) -> bool:
    return _on_gpu(config) and (config.rollout.top_p < 1.0 or config.rollout.top_k > 0)


def _check_log_probs(config: Config) -> None:
    """Raises ValueError if a run needs vLLM's log-probs before top-p and top-k, but would get those after them."""
    if not _cuts_on_gpu(config) or log_probs_mode(config) == "raw_logprobs":
        return
    ways_out = []
    if config.rollout.check_freq:
        ways_out.append("rollout.check_freq to 0")
    if config.algorithm.rollout_correction.is_active:
        ways_out.append("algorithm.rollout_correction.rollout_is and rollout_rs to null")
    if config.algorithm.rollout_correction.bypasses:
        ways_out.append("algorithm.rollout_correction.bypass_mode to false")
    if ways_out:
        raise ValueError(
            "vLLM on a GPU reports log-probs after rollout.top_p and rollout.top_k where rollout.temperature is"
            f" not 1 ({config.rollout.temperature:g}), and this run needs those before: set rollout.temperature to 1,"
            f" or {' and '.join(ways_out)}"
        )
