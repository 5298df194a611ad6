"""Checks how ranks can share the attention heads of a model: those of a vLLM engine, and of a sequence group."""


def check_heads(heads: object, key_values: object, num_ranks: int, key: str, model: str) -> None:
    """Raises ValueError unless `num_ranks` ranks can share the attention heads of a model; `key` has their number.

    Each needs whole heads, and key-value heads of its own or one with others. `heads` and `key_values` are
    num_attention_heads and num_key_value_heads of config.json. If no number is there, or one for each layer, nothing is
    checked.
    """
    if not isinstance(heads, int):
        return
    key_values = key_values if isinstance(key_values, int) else heads
    if heads % num_ranks:
        *others, last = (str(number) for number in range(1, heads + 1) if heads % number == 0)
        divisors = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{key} ({num_ranks}) must divide the {heads} attention heads of {model}: {divisors}")
    if key_values % num_ranks and num_ranks % key_values:
        raise ValueError(
            f"{key} ({num_ranks}) must divide the {key_values} key-value heads of {model}, or be a multiple of them"
        )
