"""Loads the weights of a Hugging Face folder into a model in place; each rank loads its own shard."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from services.engine import parallel
from services.engine.model.adapters import HEADS, base_parameters
from services.engine.model.file_names import FileNames
from services.engine.model.weight_files import StoredTensor, fill, have_equal_values, open_weights
from splitppo.images.settings import FAMILIES

log = logging.getLogger(__name__)

Kind = Literal["policy", "value", "reward"]
AUTO_MODELS = {
    "policy": AutoModelForCausalLM,
    "value": AutoModelForTokenClassification,
    "reward": AutoModelForSequenceClassification,
}
UNREADABLE = (OSError, ValueError, RuntimeError, KeyError, SafetensorError)


def auto_model(config: Any, kind: Kind) -> Any:
    """Returns transformers' class that makes a model of a kind from a config; a reward model reads text alone."""
    if config.model_type in FAMILIES and kind != "reward":
        return AutoModelForImageTextToText
    return AUTO_MODELS[kind]


def load_weights(model: Any, folder: Path, kind: Kind) -> None:
    """Loads a folder's weights into a model's parameters and saved buffers in place, without communication.

    Adapters stay as they are, and so do tensors on the meta device. A value head that the folder lacks is 0: all values
    are 0 before the first optimizer step, in which the loss moves the head alone. Besides its shard a rank has a piece
    of one tensor in memory; all weights only if transformers has to convert them.

    Raises:
        ValueError, OSError, RuntimeError, KeyError, SafetensorError: see `open_weights_of`; or weights do not fit.
    """
    stored = open_weights_of(model, folder, kind)
    has_new_head = False
    for target, (name, *_) in _names_by_tensor(model).items():
        if name in stored:
            if not target.is_meta:
                fill(target, *stored[name])
        elif isinstance(target, nn.Parameter):
            has_new_head = True
            parallel.local(target.detach()).zero_()
    if has_new_head:
        log.info("%s: new value head, all 0", folder)


def open_weights_of(model: Any, folder: Path, kind: Kind) -> dict[str, tuple[str, StoredTensor]]:
    """Opens a folder's weights by the names of a model's parameters and saved buffers, tied ones by the first name.

    With each tensor comes its name in the files. Only a value head may be missing.

    Raises:
        ValueError: weights are missing, or a tied one has two values; in one sentence.
        OSError, RuntimeError, KeyError, SafetensorError: the weights cannot be read.
    """
    found, missing = _find_all(model, open_weights(folder))
    missing_beside_head = [name for name in missing if kind != "value" or not name.startswith(HEADS)]
    if missing_beside_head and model.config.model_type in FAMILIES:
        raise ValueError(_lacks(folder, model, missing_beside_head))
    if missing_beside_head:
        # Some architectures have other names in files, or join tensors other than experts: transformers converts them.
        log.info("%s: transformers converts its weights, every rank holds all of them meanwhile", folder)
        whole, report = auto_model(model.config, kind).from_pretrained(
            folder, config=model.config, dtype=model.dtype, output_loading_info=True
        )
        lacking = sorted(report["missing_keys"])
        if lacking_beside_head := [name for name in lacking if kind != "value" or not name.startswith(HEADS)]:
            raise ValueError(_lacks(folder, model, lacking_beside_head))
        tensors = {name: tensor for name, tensor in whole.state_dict().items() if name not in lacking}
        found, _ = _find_all(model, tensors)
    return found


def _lacks(folder: Path, model: Any, names: Sequence[str]) -> str:
    return f"{folder} lacks weights of {type(model).__name__}: {', '.join(names[:3])}"


def names_in_files(model: Any, folder: Path) -> dict[str, list[str]]:
    """Returns the names in a folder's files of each parameter by its name in the model: of a new value head, none.

    Tied parameters have all of their names, experts that are stacked those of their parts. A name that the files lack,
    such as a tied one, or that transformers converts, is that of published files.

    Raises:
        ValueError, OSError, SafetensorError: the files cannot be opened.
    """
    stored = open_weights(folder).keys()
    in_files = FileNames.of(model)
    found = {}
    for tensor, names in _names_by_tensor(model).items():
        if not isinstance(tensor, nn.Parameter):
            continue
        of_names: list[str] = []
        num_experts = len(tensor) if tensor.ndim else 1
        for name in names:
            candidates = [in_files.names(candidate, num_experts) for candidate in _candidates([name], model)]
            own = next((some for some in candidates if not stored.isdisjoint(some)), candidates[0])
            is_new_head = stored.isdisjoint(own) and name.startswith(HEADS)
            if not is_new_head:
                of_names += own
        found[names[0]] = of_names
    return found


def _find_all(model: Any, source: Mapping[str, StoredTensor]) -> tuple[dict[str, tuple[str, StoredTensor]], list[str]]:
    """Finds the tensors of a model in `source`; returns them, and the names of the parameters that it lacks.

    Raises:
        ValueError: `source` has different values under two names of one tensor, such as a tied output layer.
    """
    found = {}
    missing = []
    in_files = FileNames.of(model)
    for tensor, names in _names_by_tensor(model).items():
        under_its_names = ((name, in_files.find(source, name)) for name in _candidates(names, model))
        stored = {name: values for name, values in under_its_names if values is not None}
        if stored:
            first, *others = stored
            for other in others:
                if not have_equal_values(stored[first], stored[other], tensor.dtype):
                    raise ValueError(
                        f"its weights have other values in {other} than in {first}, but by its config.json both are"
                        f" one: to use both, set tie_word_embeddings to false there; else remove {other}"
                    )
            found[names[0]] = first, stored[first]
        elif isinstance(tensor, nn.Parameter):
            missing.append(names[0])
    return found, missing


def _names_by_tensor(model: nn.Module) -> dict[Tensor, list[str]]:
    """Returns all names of each parameter and buffer: tied ones have several."""
    names_of: dict[Tensor, list[str]] = {}
    for name, tensor in (*base_parameters(model, remove_duplicate=False).items(), *model.named_buffers()):
        names_of.setdefault(tensor, []).append(name)
    return names_of


def _candidates(names: Sequence[str], model: Any) -> Iterator[str]:
    """Yields the names that files may have for a tensor: each with and without the prefix, which base models lack."""
    for name in names:
        yield from (name, name.removeprefix(f"{model.base_model_prefix}."))
