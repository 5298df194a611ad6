"""Makes small configurations of every architecture, and changes their fields at random.

A small model has all that a large one has: several layers, each kind of layer, grouped heads, experts, and windows and
chunks that are shorter than the rows of the comparison.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from splitppo.config.sections.models import is_dropout

VOCABULARY = 53
POSITIONS = 128
PAD = 0
EOS = 1

_WIDTH = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "lru_width")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "block_ff_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "mamba_n_heads",
    "mamba_num_heads",
    "swa_num_attention_heads",
    "linear_num_value_heads",
)
_KEY_VALUES = (
    "num_key_value_heads",
    "num_global_key_value_heads",
    "swa_num_key_value_heads",
    "linear_num_key_heads",
)
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "top_k", "moe_topk")
_EXPERT_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size")
_WINDOWS = ("sliding_window", "attention_window", "attention_window_size", "window_size", "local_attention")
_EIGHTS = (
    *("head_dim", "attention_head_dim", "kv_channels", "global_head_dim", "swa_head_dim", "swa_v_head_dim"),
    *("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("state_size", "mamba_d_state", "ssm_state_size", "chunk_size", "mamba_chunk_size", "hidden_size_per_layer_input"),
    *("index_head_dim", "index_topk", "query_pre_attn_scalar"),
)
_SIXTEENS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "mamba_d_head", "mamba_head_dim")
_ONES = ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts", "mamba_n_groups")

SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(_WIDTH, 32),
    **dict.fromkeys(_INNER, 48),
    **dict.fromkeys(_LAYERS, 4),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_KEY_VALUES, 2),
    **dict.fromkeys(_POSITIONS, POSITIONS),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_CHOSEN, 2),
    **dict.fromkeys(_EXPERT_WIDTHS, 24),
    **dict.fromkeys(_WINDOWS, 5),
    **dict.fromkeys(_EIGHTS, 8),
    **dict.fromkeys(_SIXTEENS, 16),
    **dict.fromkeys(_ONES, 1),
    **dict.fromkeys(("d_inner", "mamba_d_ssm"), 64),
    **dict.fromkeys(("encoder_layers", "mamba_expand", "max_window_layers"), 2),
    "rotary_dim": 4,
    "time_step_rank": 4,
    "n_groups": 1,
    "laurel_rank": 4,
    "conv_L_cache": 3,
    "attention_chunk_size": 6,
    "index_n_heads": 32,
    "num_kv_shared_layers": 0,
    "use_sliding_window": True,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
# None in a default config, and meaningful so: only these are set nevertheless.
_SET_ALTHOUGH_NONE = ("sliding_window", "pad_token_id", "eos_token_id", "num_key_value_heads")
_PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types")
_OMIT = object()
_TWO_HEAD_SIZES = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_key_value_heads": 2,
    "bos_token_id": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# What a single architecture needs so that it can be built, or so that what is special about it is switched on.
_SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
    "cwm": {"bos_token_id": 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "reformer": {"is_decoder": True},
    "zaya": {"num_experts_per_tok": 1},
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "falcon_h1": {"lm_head_multiplier": 0.5, "layer_types": _OMIT},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _TWO_HEAD_SIZES),
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"partial_rotary_factor": 0.5},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite": {
        "logits_scaling": 3.0,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "layers_block_type": _OMIT,
        "shared_intermediate_size": 24,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "modernbert-decoder": {"bos_token_id": 2, "cls_token_id": 2, "sep_token_id": 2},
    "phi3": {
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
        },
    },
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "zamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
}


def tiny_config(model_type: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Returns a configuration of an architecture with 4 layers of width 32, a vocabulary of 53, and short windows.

    `changes` replace fields of it. Whatever its class raises for a field that does not fit goes on to the caller.
    """
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    fields = {name: value for name, value in SIZES.items() if _takes(default, name)}
    for name in _PER_LAYER:
        kinds = getattr(default, name, None)
        if _is_settable(config_class, name) and isinstance(kinds, list | tuple) and kinds and isinstance(kinds[0], str):
            fields[name] = _each_kind(kinds, fields.get("num_hidden_layers", 4))
    if "kv_lora_rank" in fields:  # multi-head latent attention: every head has its own keys
        fields["num_key_value_heads"] = 4
    fields.update({**_SPECIAL.get(model_type, {}), **(changes or {})})
    return config_class(**{name: value for name, value in fields.items() if value is not _OMIT})


def mutation(model_type: str, rng: random.Random) -> dict[str, Any]:
    """Draws one to three fields of an architecture's configuration, and other values for them.

    The fields are numbers and switches that change what is computed and not the shapes: multipliers, caps, windows,
    biases of the choice of experts, kinds of layers.
    """
    config = tiny_config(model_type)
    candidates = _candidates(config)
    names = rng.sample(sorted(candidates), min(len(candidates), rng.randint(1, 3)))
    return {name: candidates[name](rng) for name in names}


def _candidates(config: Any) -> dict[str, Callable[[random.Random], Any]]:
    """Returns the fields of a configuration that may change, each with a function that draws a value."""
    found: dict[str, Callable[[random.Random], Any]] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or name in _FIXED or is_dropout(name) or not _is_settable(type(config), name):
            continue
        if isinstance(value, bool):
            found[name] = lambda rng: rng.random() < 0.5
        elif isinstance(value, float) or (value is None and "cap" in name):
            factor = value or 1.0
            found[name] = lambda rng, factor=factor: factor * rng.choice((0.25, 0.5, 2.0, 3.0))
        elif name in _WINDOWS or name in ("attention_chunk_size", "chunk_size", "mamba_chunk_size"):
            found[name] = lambda rng: rng.choice((3, 4, 7, 64))
        elif name == "layer_types" and value:
            found[name] = lambda rng, kinds=tuple(value): rng.choices(kinds, k=len(kinds))
    return found


# What the comparison itself needs, what draws numbers at random, and what only initialises or describes.
_FIXED = frozenset(
    {
        *("use_cache", "is_encoder_decoder", "output_attentions", "output_hidden_states", "return_dict"),
        *("initializer_range", "init_std", "router_aux_loss_coef", "output_router_logits", "chunk_size_feed_forward"),
        *("add_cross_attention", "is_decoder", "rope_theta", "transformers_version"),
    }
)


def _each_kind(kinds: Sequence[str], num_layers: int) -> list[str]:
    """Returns the kinds of that many layers, with each kind of a default configuration in turn."""
    different = list(dict.fromkeys(kinds))
    return [different[layer % len(different)] for layer in range(num_layers)]


def _takes(default: Any, name: str) -> bool:
    """Returns True if a configuration has a field that can be set, and whose None has no meaning of its own."""
    try:
        value = getattr(default, name)
    except (AttributeError, RuntimeError):  # RuntimeError: its layers have values of their own
        return False
    return _is_settable(type(default), name) and (value is not None or name in _SET_ALTHOUGH_NONE)


def _is_settable(config_class: Any, name: str) -> bool:
    """Returns True if a configuration takes a field, and does not compute it from others."""
    name = config_class.attribute_map.get(name, name)
    return not isinstance(getattr(config_class, name, None), property)
