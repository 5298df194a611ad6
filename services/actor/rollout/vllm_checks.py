"""What vLLM can be known not to do, before any weight is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from services.actor.rollout.vllm import GIB, check_temperature, kv_cache_bytes, log_probs_mode, max_model_len
from services.actor.rollout.vllm_process import import_vllm
from services.engine.model import resolve_folder
from splitppo.config import Config

# Tokens of a block of the KV cache on a CPU (on a GPU blocks are smaller).
_CPU_BLOCK = 128
_FULL_ATTENTION = "full_attention"


def check_model(config: Config) -> None:
    """Checks model, KV cache and sampling against what vLLM can do.

    Raises:
        ValueError: vLLM does not know the model, cannot compute its attention, cannot hold one sequence, or does not
            report the log-probs that the run needs.
    """
    import_vllm()
    description = json.loads((resolve_folder(config.actor.model) / "config.json").read_text(encoding="utf-8"))
    _check_architecture(config, description)
    _check_head_size(config, description)
    _check_kv_cache(config, description)
    check_temperature(config.rollout.temperature, "rollout.temperature")
    check_temperature(config.evaluation.temperature, "evaluation.temperature")
    _check_log_probs(config)


def _check_architecture(config: Config, description: Mapping[str, Any]) -> None:
    from vllm import ModelRegistry

    architectures = description.get("architectures") or []
    known = ModelRegistry.get_supported_archs()
    if not set(architectures) & set(known):
        named = ", ".join(architectures) or f"no architecture, model_type {description.get('model_type')!r}"
        raise ValueError(
            f"vLLM does not know the model of actor.model ({config.actor.model}: {named}); set rollout.backend to hf"
        )


def _check_head_size(config: Config, description: Mapping[str, Any]) -> None:
    """Attention on a CPU is compiled for some head sizes only, and says so at the first token."""
    size = _head_size(description)
    if config.services.actor.devices or size is None:
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise ValueError(
            f"actor.model has attention heads of size {size}, and vLLM on a CPU computes"
            f" {', '.join(map(str, sizes))} only; set rollout.backend to hf"
        )


def _check_kv_cache(config: Config, description: Mapping[str, Any]) -> None:
    available, heads = kv_cache_bytes(config), _number(description, "num_attention_heads")
    size, layers = _head_size(description), _number(description, "num_hidden_layers")
    if available is None or heads is None or size is None or layers is None:
        return
    kv_heads = _number(description, "num_key_value_heads") or heads
    ranks = config.rollout.vllm.tensor_model_parallel_size
    block = 16 if config.services.actor.devices else _CPU_BLOCK
    positions = math.ceil(max_model_len(config) / block) * block
    value_bytes = 4 if config.actor.dtype == "fp32" else 2
    needed = 2 * layers * max(1, kv_heads // ranks) * size * positions * value_bytes
    if needed > available:
        raise ValueError(
            f"rollout.vllm.kv_cache_gb ({available / GIB:.3g}) must hold one sequence of {max_model_len(config)} tokens"
            f" (rollout.vllm.max_model_len), which takes {needed / GIB:.3g} GiB; raise rollout.vllm.kv_cache_gb"
        )


def _check_log_probs(config: Config) -> None:
    """Who compares the engine's log-probs with the trainer's needs them before top-p and top-k."""
    rollout, correction = config.rollout, config.algorithm.rollout_correction
    cuts = rollout.top_p < 1.0 or rollout.top_k > 0
    if not (config.services.actor.devices and cuts and log_probs_mode(config) == "processed_logprobs"):
        return
    ways_out = []
    if rollout.check_freq:
        ways_out.append("rollout.check_freq to 0")
    if correction.is_active:
        ways_out.append("algorithm.rollout_correction.rollout_is and rollout_rs to null")
    if ways_out:
        raise ValueError(
            "vLLM on a GPU reports log-probs after rollout.top_p and rollout.top_k where rollout.temperature is"
            f" not 1 ({rollout.temperature:g}), and this run needs those before: set rollout.temperature to 1, or"
            f" {' and '.join(ways_out)}"
        )


def _head_size(description: Mapping[str, Any]) -> int | None:
    hidden, heads = _number(description, "hidden_size"), _number(description, "num_attention_heads")
    return _number(description, "head_dim") or (hidden // heads if hidden and heads else None)


def _number(description: Mapping[str, Any], key: str) -> int | None:
    """A number of the model's config, or of its language model's."""
    value = description.get(key, (description.get("text_config") or {}).get(key))
    return value if isinstance(value, int) else None
