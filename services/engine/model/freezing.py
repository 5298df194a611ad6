"""Freezes the weights that the keys `freeze_vision_tower` and `freeze` name, before a model is sharded."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.engine.model.adapters import base_parameters, names_in_adapter, saved_parameters
from services.engine.model.loading import resolve_folder, unusable
from services.engine.model.vision import vision_tower
from services.engine.model.weights import UNREADABLE, Kind, names_in_files
from splitppo.config import TrainedModelConfig
from splitppo.config.frozen_weights import frozen_names, refuse_all_frozen


def freeze_weights(model: Any, config: TrainedModelConfig, kind: Kind) -> None:
    """Freezes a vision tower, if `config.freeze_vision_tower`, and the weights that `config.freeze` names.

    The model has the adapters of `inject`. Frozen weights keep their dtype, and all else of a model but gradients and
    moments has them as before.

    Raises:
        ValueError: a pattern names no weight that would learn, some experts of a layer without the others, or a new
            adapter such that it would never change anything; or nothing would learn.
    """
    tower = vision_tower(model)
    if config.freeze_vision_tower and tower is not None:
        tower.requires_grad_(requires_grad=False)
    if not config.freeze:
        return
    role = "actor" if kind == "policy" else "critic"
    names = _names_by_weight(model, config, kind)
    every_name = {name for of_weight in names.values() for name in of_weight}
    frozen = frozen_names(config, every_name, role)
    weights = saved_parameters(model)
    for weight, of_weight in names.items():
        found = frozen.intersection(of_weight)
        if not found:
            continue
        if ".experts." in weight and len(found) < len(of_weight):
            learning = next(name for name in of_weight if name not in found)
            raise ValueError(
                f"{role}.freeze freezes {min(found)} and not {learning}: both are parts of one weight here, {weight},"
                " the experts of a layer; expected patterns that match all of them or none"
            )
        weights[weight].requires_grad = False
    if not any(weight.requires_grad for weight in weights.values()):
        raise refuse_all_frozen(config, role)


def _names_by_weight(model: Any, config: TrainedModelConfig, kind: Kind) -> Mapping[str, Sequence[str]]:
    """Returns the names by which `freeze` may name each weight of `saved_parameters`; a new value head has none."""
    try:
        in_files = names_in_files(model, resolve_folder(config.model))
    except UNREADABLE as error:
        raise unusable(config.model, kind, error) from error
    in_adapter = names_in_adapter(config, kind)
    base = base_parameters(model)
    names = {}
    for name in saved_parameters(model):
        is_known = name in in_adapter or name not in base
        names[name] = [name] if is_known else in_files[name]
    return names
