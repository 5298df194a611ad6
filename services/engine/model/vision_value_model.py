"""Makes a value model of a model that reads images, for which transformers has no class with one label per token."""

import functools
from typing import Any

from torch import nn


def as_value_model(model: Any) -> None:
    """Replaces the output layer of a model by a linear layer `score` with one output, without a bias.

    The model's own forward then returns values as logits, [rows, positions, 1]. The new layer is where parameters are
    registered, on the meta device, and has no value.
    """
    output = model.lm_head
    del model.lm_head
    model.score = nn.Linear(output.in_features, 1, bias=False, dtype=output.weight.dtype)
    model_class: Any = type(model)
    model.__class__ = _with_score(model_class)
    model.all_tied_weights_keys = {}


@functools.cache
def _with_score(model_class: Any) -> Any:
    """Makes the class of value models of this class; it has the same name, by which transformers knows its weights."""
    head = property(lambda self: self.score, doc="The layer that transformers' forward calls as the output layer.")
    return type(model_class.__name__, (model_class,), {"lm_head": head, "_tied_weights_keys": {}})
