"""Reads attributes of a model's config that may differ from layer to layer, as the heads of Gemma 4 do."""

from typing import Any


def of_each_layer(config: Any, name: str) -> list[Any]:
    """Returns an attribute of a text model's config for each layer; None where it has none."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    values = [getattr(layer, name, None) for layer in layers]
    return values if len(values) > 1 else values * config.num_hidden_layers


def of_all_layers(config: Any, name: str) -> Any:
    """Returns an attribute that all layers have in common; None if they differ, or have none."""
    values = of_each_layer(config, name)
    return values[0] if values and all(value == values[0] for value in values) else None
