"""Loads the weights of a Hugging Face folder into a model in place; each rank loads its own shard."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from services.engine import parallel
from services.engine.model.weight_files import StoredTensor, open_weights, read_rows, shape_of

log = logging.getLogger(__name__)

Kind = Literal["policy", "value", "reward"]
AUTO_MODELS = {
    "policy": AutoModelForCausalLM,
    "value": AutoModelForTokenClassification,
    "reward": AutoModelForSequenceClassification,
}
UNREADABLE = (OSError, ValueError, RuntimeError, KeyError, SafetensorError)
_HEADS = ("score", "classifier")


def load_weights(model: Any, folder: Path, kind: Kind, *, seed: int = 0) -> None:
    """Loads a folder's weights into a model's parameters and saved buffers in place, without communication.

    A value head that the folder lacks is initialised from a generator seeded by (seed, kind); nothing else may be
    missing. Besides its shard a rank has a piece of one tensor in memory; all weights only if transformers has to
    convert them.

    Raises:
        ValueError: weights are missing or do not fit, in one sentence.
        OSError, RuntimeError, KeyError, SafetensorError: the weights cannot be read.
    """
    prefix = model.base_model_prefix
    missing = _fill_from(model, open_weights(folder), prefix)
    if any(kind != "value" or not name.startswith(_HEADS) for name in missing):
        # Some architectures have other names in files, or stack tensors: transformers converts them.
        log.info("%s: transformers converts its weights, every rank holds all of them meanwhile", folder)
        whole, report = AUTO_MODELS[kind].from_pretrained(
            folder, config=model.config, dtype=model.dtype, output_loading_info=True
        )
        lacking = sorted(report["missing_keys"])
        if heads_lack := [name for name in lacking if kind != "value" or not name.startswith(_HEADS)]:
            raise ValueError(f"{folder} lacks weights of {type(model).__name__}: {', '.join(heads_lack[:3])}")
        tensors = {name: tensor for name, tensor in whole.state_dict().items() if name not in lacking}
        missing = _fill_from(model, tensors, prefix)
    _initialise_head(model, missing, kind=kind, seed=seed)
    if missing:
        log.info("%s: new value head, seed %d", folder, seed)


def _fill_from(model: nn.Module, source: Mapping[str, StoredTensor], prefix: str) -> list[str]:
    """Copies stored tensors into a model; returns the sorted names of the parameters that `source` lacks."""
    names_of: dict[Tensor, list[str]] = {}  # every tensor once: tied weights have several names
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        names_of.setdefault(tensor, []).append(name)
    missing = []
    for target, names in names_of.items():
        if (stored_name := _find(source, names, prefix)) is not None:
            _fill(target, stored_name, source[stored_name])
        elif isinstance(target, nn.Parameter):
            missing.append(names[0])
    return sorted(missing)


def _find(source: Mapping[str, StoredTensor], names: Sequence[str], prefix: str) -> str | None:
    """Finds a tensor by one of its names, with or without `prefix` (base models lack it); returns the name or None."""
    candidates = [candidate for name in names for candidate in (name, name.removeprefix(f"{prefix}."))]
    return next((candidate for candidate in candidates if candidate in source), None)


@torch.no_grad()
def _fill(target: Tensor, name: str, stored: StoredTensor) -> None:
    if (shape := shape_of(stored)) != tuple(target.shape):
        raise ValueError(f"{name} has shape {list(shape)}, expected {list(target.shape)}")
    start, stop = parallel.local_rows(target)
    shard = parallel.local(target)
    rows = shard if shard.ndim else shard.reshape(1)
    for first, piece in read_rows(stored, start, stop):
        rows[first - start : first - start + len(piece)].copy_(piece)


@torch.no_grad()
def _initialise_head(model: Any, missing: Sequence[str], *, kind: Kind, seed: int) -> None:
    digest = hashlib.sha256(f"{seed}/{kind}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    for name in missing:
        parameter = model.get_parameter(name)
        values = torch.zeros(parameter.shape)
        if parameter.ndim > 1:
            values.normal_(0.0, getattr(model.config, "initializer_range", 0.02), generator=generator)
        _fill(parameter, name, values)
