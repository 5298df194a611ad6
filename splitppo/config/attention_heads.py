"""Checks how the ranks of a sequence group can share the attention heads of a model."""

from collections.abc import Mapping
from typing import Any


def check_heads(sizes: Mapping[str, Any], num_ranks: int, key: str, model: str) -> None:
    """Raises ValueError unless `num_ranks` ranks can share the attention heads of a model; `key` has their number.

    Each has whole heads, and keys and values of its own or of one head. `sizes` has the entries of config.json.
    """
    heads = sizes.get("num_attention_heads") or num_ranks
    key_values = sizes.get("num_key_value_heads") or heads
    if heads % num_ranks:
        *others, last = (str(number) for number in range(1, heads + 1) if heads % number == 0)
        divisors = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{key} ({num_ranks}) must divide the {heads} attention heads of {model}: {divisors}")
    if key_values % num_ranks and num_ranks % key_values:
        raise ValueError(
            f"{key} ({num_ranks}) must divide the {key_values} key-value heads of {model}, or be a multiple of them"
        )
