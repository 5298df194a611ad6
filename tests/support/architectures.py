"""Ten architectures whose rows can be packed, as tiny random policies, with windows where they have some."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tests.support.models import SIZES, save_random

# Two layers of 4 heads, over 2 key-value heads where the architecture has groups.
OF_ALL = {**SIZES, "head_dim": 8, "tie_word_embeddings": False}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "ministral": {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "phi3": {"sliding_window": 5},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": 5},
}


def save_architecture(name: str, folder: Path) -> Path:
    """Writes a random policy of one of `ARCHITECTURES`; returns the folder."""
    config: PreTrainedConfig = AutoConfig.for_model(name, **OF_ALL, **ARCHITECTURES[name])
    return save_random(AutoModelForCausalLM.from_config, config, folder)
