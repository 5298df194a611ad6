"""Finds where the rotary positions of a model depend on the length of a row."""

from collections.abc import Mapping
from typing import Any


def rope_switch(config: Mapping[str, Any]) -> int | None:
    """Returns the number of tokens above which a whole row gets other rotary factors (longrope); None: never.

    `config` is the content of a config.json of any version: with `rope_parameters`, which may have an entry for each
    kind of layer, or with `rope_scaling`.
    """
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        described = config.get(name)
        if isinstance(described, Mapping):
            kinds = [value for value in described.values() if isinstance(value, Mapping)]
            found += [_switch(kind, config) for kind in [described, *kinds]]
    return min((switch for switch in found if switch is not None), default=None)


def _switch(rope: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """Returns the length above which one kind of layers gets other factors; None for any method but longrope.

    The length stands in the rope's own entry, else in the config, in one of two places.
    """
    if (rope.get("rope_type") or rope.get("type")) != "longrope":
        return None
    lengths = (
        rope.get("original_max_position_embeddings"),
        config.get("original_max_position_embeddings"),
        config.get("max_position_embeddings"),
    )
    return next((length for length in lengths if isinstance(length, int)), None)
