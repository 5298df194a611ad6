"""LoRA adapters (Hu et al., 2021): layers of peft beside linear layers of a frozen Hugging Face model.

    y = W x + (lora_alpha / rank) B A x

No other module knows peft's names. Elsewhere a weight of the model has its Hugging Face name, as without adapters, and
the two weights of an adapter are `<name of the layer>.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank].
"""

import hashlib
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from services.engine import parallel
from services.engine.model.linear import use_onednn
from services.engine.model.vision import vision_tower
from services.engine.model.weight_files import StoredTensor, fill, open_file
from splitppo.config import TrainedModelConfig
from splitppo.config.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, NAME_PREFIX, check_adapter
from splitppo.model_folder import local_folder

log = logging.getLogger(__name__)

HEADS = ("score", "classifier")
_NAME = "default"  # peft's name of the only adapter


def inject(model: Any, config: TrainedModelConfig, *, kind: str) -> None:
    """Freezes a model on the meta device and puts an fp32 adapter beside each target layer, if `lora_rank` is not 0.

    The head of a value model gets no adapter: it is trained whole, in fp32. `fill_adapters` gives values.

    Raises:
        ValueError: the model has no such target layers, or they cannot have an adapter.
    """
    if not config.lora_rank:
        return
    from peft import LoraConfig, inject_adapter_in_model  # needed with adapters alone

    heads = [name for name, _ in model.named_children() if kind == "value" and name in HEADS]
    alpha = int(config.lora_alpha) if config.lora_alpha.is_integer() else config.lora_alpha
    described = LoraConfig(
        base_model_name_or_path=config.model,
        task_type="CAUSAL_LM" if kind == "policy" else "TOKEN_CLS",
        r=config.lora_rank,
        lora_alpha=alpha,  # type: ignore[arg-type] # a fraction works as well
        target_modules=_target_modules(model, config, heads),
    )
    inject_adapter_in_model(described, model, low_cpu_mem_usage=True)
    described.modules_to_save = heads or None  # before, peft would wrap the head, too
    described.target_modules = sorted(described.target_modules or ())  # a set has another order in each process
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_adapter(name) or _first(name) in heads)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if parallel.rank() == 0 and any(".experts." in name for name in base_parameters(model)):
        log.info("%s: experts are stacked, and no linear layers: they get no adapters and stay frozen", config.model)
    use_onednn(model)


def _target_modules(model: Any, config: TrainedModelConfig, heads: Sequence[str]) -> list[str]:
    """Returns the last parts of the names of the target layers, if no other module shares them; else whole names.

    A frozen vision tower has none. A list names the ends of layers' names, a text is a regular expression for whole
    names. Only a pattern of `exclude_modules` may match no layer, since it may be meant for parts that other models
    have.

    Raises:
        ValueError: a name matches nothing, no layer is left, or one is left that can have no adapter.
    """
    key = "critic" if heads else "actor"
    tower = vision_tower(model) if config.freeze_vision_tower else None
    of_tower = set() if tower is None else set(tower.modules())
    linear = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module not in of_tower
    ]
    output = model.get_output_embeddings()
    no_adapter = {name: "its logits are made in chunks" for name in linear if model.get_submodule(name) is output}
    no_adapter |= {name: "it is trained whole" for name in linear if _first(name) in heads}
    inner = [name for name in linear if name not in no_adapter]
    kinds_of_inner = ", ".join(dict.fromkeys(_last(name) for name in inner)) or "none"
    no_layer = f"no linear layer of {type(model).__name__}; it has {kinds_of_inner}"
    if config.target_modules == "all-linear":
        targets = {*inner}
    else:
        targets = _chosen_layers(linear, config.target_modules, f"{key}.target_modules", no_layer)
    if config.exclude_modules:
        targets -= _chosen_layers(
            linear, config.exclude_modules, f"{key}.exclude_modules", no_layer, may_match_none=True
        )
    if refused := next((name for name in linear if name in targets and name in no_adapter), None):
        raise ValueError(f"{key}.target_modules: {refused} cannot have an adapter ({no_adapter[refused]})")
    if not targets:
        without = f" without {key}.exclude_modules" if config.exclude_modules else ""
        raise ValueError(f"{key}.target_modules{without} leaves no linear layer of {type(model).__name__}")
    last_parts = sorted({_last(name) for name in targets})
    with_these_last_parts = {name for name, _ in model.named_modules() if _last(name) in last_parts}
    return last_parts if with_these_last_parts == targets else sorted(targets)


def _chosen_layers(
    layers: Sequence[str], wanted: str | Sequence[str], key: str, no_layer: str, *, may_match_none: bool = False
) -> set[str]:
    """Returns the layers that a key of the configuration chooses: by a regular expression, or by ends of their names.

    `may_match_none`: a regular expression need not match a layer, e.g. .*visual.* for a text model. `no_layer` ends
    the sentence of an error.

    Raises:
        ValueError: the expression matches no layer, or a name of the list is the end of none.
    """
    if isinstance(wanted, str):
        matched = {layer for layer in layers if re.fullmatch(wanted, layer)}
        if not matched and not may_match_none:
            raise ValueError(f"{key}: {wanted} matches {no_layer}")
        return matched
    chosen: set[str] = set()
    for end in wanted:
        with_this_end = [layer for layer in layers if f".{layer}".endswith(f".{end}")]
        if not with_this_end:
            raise ValueError(f"{key}: {end} is {no_layer}")
        chosen.update(with_this_end)
    return chosen


def _first(name: str) -> str:
    return name.partition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _layers(model: nn.Module) -> dict[str, Any]:
    """Returns peft's layers by the names that the layers have without adapters."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def rank_of(model: nn.Module) -> int:
    """Returns the rank of a model's adapters; 0 for a model without adapters."""
    return next((int(layer.r[_NAME]) for layer in _layers(model).values()), 0)


def base_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """Returns all weights of a model but its adapters, by Hugging Face name; tied ones once, or by each name."""
    named = model.named_parameters(remove_duplicate=remove_duplicate)
    return {name.replace(".base_layer.", "."): weight for name, weight in named if not _is_adapter(name)}


def saved_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the weights that checkpoints hold, by name: adapters and value head, or all weights, tied ones once."""
    named = dict(model.named_parameters())
    if not any(map(_is_adapter, named)):
        return named
    return {
        name.replace(f".{_NAME}.", "."): weight
        for name, weight in named.items()
        if _is_adapter(name) or _first(name) in HEADS
    }


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the weights that training changes, by name: those of `saved_parameters` that are not frozen."""
    return {name: weight for name, weight in saved_parameters(model).items() if weight.requires_grad}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Lets a `with` block compute with the frozen model alone, without gradient: bit for bit a `FrozenModel`."""
    layers = _layers(model).values()
    for layer in layers:  # peft's own method switches requires_grad, too
        layer._disable_adapters = True  # noqa: SLF001
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001


def merge(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """Computes W + scaling * B A in the dtype of W, bit for bit like peft's merge_and_unload; `weight` stays as it is.

    `down` is A and `up` is B, both fp32. The sum is made in fp32 and rounded once.
    """
    return (weight + (up @ down) * scaling).to(weight.dtype)


def whole_weights(model: nn.Module, dtype: torch.dtype, *, copy: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, whole tensor) of each weight, adapters merged, tied ones once. Collective.

    With `copy` no tensor shares memory with the model.
    """
    layers = {f"{name}.weight": layer for name, layer in _layers(model).items()}
    for name, parameter in base_parameters(model).items():
        weight = parameter.detach()
        if (layer := layers.get(name)) is None:
            yield name, parallel.full(weight.to(dtype, copy=copy))
        else:
            down, up = (parallel.full(part[_NAME].weight.detach()) for part in (layer.lora_A, layer.lora_B))
            yield name, merge(parallel.full(weight), down, up, layer.scaling[_NAME]).to(dtype)


@torch.no_grad()
def fill_adapters(model: nn.Module, config: TrainedModelConfig, *, kind: str, seed: int) -> None:
    """Fills the adapters of `inject`, sharded or not: new ones, or those of `lora_adapter_path`.

    Of a new one, A is Kaiming-uniform by a generator seeded by (seed, name), and B is 0.

    Raises:
        ValueError: `lora_adapter_path` is no adapter of these layers, or cannot be read; one sentence.
    """
    if not config.lora_rank:
        return
    weights = saved_parameters(model)
    adapters = {name: weight for name, weight in weights.items() if _is_adapter(name)}
    if config.lora_adapter_path is not None:
        for name, stored in _open_adapter(config, kind, weights).items():
            fill(weights[name], f"{_role(kind)}.lora_adapter_path: {name}", stored)
        return
    for name, weight in adapters.items():
        values = torch.zeros(weight.shape)
        if ".lora_A." in name:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            nn.init.kaiming_uniform_(values, a=math.sqrt(5.0), generator=generator)
        fill(weight, name, values)


def names_in_adapter(config: TrainedModelConfig, kind: str) -> set[str]:
    """Returns the names, as in `saved_parameters`, of the weights of `lora_adapter_path`; none without this key.

    Raises:
        ValueError: the adapter cannot be used; one sentence.
    """
    return set() if config.lora_adapter_path is None else {*_stored_adapter(config, kind)}


def _role(kind: str) -> str:
    return "actor" if kind == "policy" else "critic"


def _stored_adapter(config: TrainedModelConfig, kind: str) -> dict[str, StoredTensor]:
    """Opens the adapter that training begins with: its tensors (and those of a value head) by our names."""
    assert config.lora_adapter_path is not None
    folder = local_folder(config.lora_adapter_path, (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    check_adapter(folder, _role(kind), config)
    file = folder / ADAPTER_WEIGHTS
    try:
        return {name.removeprefix(NAME_PREFIX): tensor for name, tensor in open_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{_role(kind)}.lora_adapter_path: cannot read {file}: {error}") from error


def _open_adapter(config: TrainedModelConfig, kind: str, weights: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Opens the adapter that training begins with, as `_stored_adapter`, and checks that it is one of these weights."""
    key = _role(kind)
    stored = _stored_adapter(config, kind)
    if different := {*filter(_is_adapter, stored)} ^ {*filter(_is_adapter, weights)}:
        has = ", ".join(sorted({name.split(".")[-3] for name in stored if _is_adapter(name)}))
        raise ValueError(
            f"{key}.lora_adapter_path and {key}.target_modules differ in {min(different).rpartition('.lora_')[0]!r}:"
            f" set target_modules to the layers of the adapter ([{has}])"
        )
    if unknown := stored.keys() - weights.keys():
        raise ValueError(
            f"{key}.lora_adapter_path: {config.lora_adapter_path} holds {min(unknown)!r}, which is not supported"
        )
    return stored


def describe_adapters(model: Any) -> tuple[float, Any]:
    """Returns the scaling of the adapters of `inject`, and the content of peft's adapter_config.json as an object."""
    return next(float(layer.scaling[_NAME]) for layer in _layers(model).values()), model.peft_config[_NAME]


def peft_name(name: str) -> str:
    """Returns the name that a weight of `saved_parameters` has in peft's files."""
    return f"{NAME_PREFIX}{name}"
