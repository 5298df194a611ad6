"""Reads the sizes of a model from config.json and the headers of its safetensors files, without reading weights."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from splitppo.config import TrainedModelConfig
from splitppo.config_error import config_errors
from splitppo.model_folder import read_json
from splitppo.weight_files import weight_files

Kind = Literal["policy", "value"]
Shapes = Mapping[str, tuple[int, ...]]

_OUTPUT_LAYERS = ("lm_head.", "embed_out.")
_VALUE_HEADS = ("score.", "classifier.")
_IN_A_LAYER = re.compile(r".*?\.\d+(?=\.)")
_OF_EXPERTS = (".experts.", ".gate.weight")
_GATES = ("gate_proj", "gate_up_proj", ".experts.0.w3.")
# Names of a size in config.json; the first that it has counts.
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size",),
}


class UnknownShape(Exception):
    """Raised for a model whose memory cannot be estimated, by no mistake of the user; the text is the reason."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a transformer as the engine builds it: numbers of weights, and widths of activations."""

    num_parameters: int  # tied weights count once
    layer_parameters: int  # in the largest decoder layer
    root_parameters: int  # in no layer: embedding, last norm, output layer
    num_layers: int
    hidden: int
    intermediate: int  # of all experts that see one token
    attention: int  # query heads x head dimension
    key_values: int  # key-value heads x head dimension
    vocabulary: int
    is_gated: bool  # the MLP multiplies two projections
    is_tied: bool  # the output layer is the embedding
    windows: tuple[int | None, ...]  # sliding window of each layer, in positions; None: a token sees all before it
    head_dim: int = 0  # of a query or key-value head
    head_parameters: int = 0  # of the value head
    linear_widths: Mapping[str, int] = field(default_factory=dict)  # linear layers by name: inputs + outputs
    num_frozen: int = 0  # weights that are not trained
    experts_per_token: int = 0  # 0: not a mixture of experts
    adapter_outputs: int = 0  # numbers that a token has in the adapters of a decoder layer, between A and B

    @property
    def num_trained(self) -> int:
        """The number of weights that the optimizer updates."""
        return self.num_parameters - self.num_frozen

    def with_adapters(self, trained: TrainedModelConfig) -> "ModelShape":
        """Returns the shape of this model with the adapters of `trained`: all other weights but the head are frozen.

        An adapter of a linear layer has lora_rank x (inputs + outputs) weights. Without adapters it is this shape.
        """
        if not trained.lora_rank:
            return self
        widths = [width for name, width in self.linear_widths.items() if _has_adapter(name, trained)]
        adapters = trained.lora_rank * sum(widths)
        return replace(
            self,
            num_parameters=self.num_parameters + adapters,
            layer_parameters=self.layer_parameters + adapters // self.num_layers,
            num_frozen=self.num_parameters - self.head_parameters,
            adapter_outputs=trained.lora_rank * len(widths) // self.num_layers,
        )


def _has_adapter(name: str, trained: TrainedModelConfig) -> bool:
    """Returns True if the linear layer gets an adapter, as peft decides."""
    is_target = trained.target_modules == "all-linear" or _is_named(name, trained.target_modules)
    return is_target and not (trained.exclude_modules and _is_named(name, trained.exclude_modules))


def _is_named(name: str, modules: str | tuple[str, ...]) -> bool:
    if isinstance(modules, str):
        return re.fullmatch(modules, name) is not None
    return any(name == module or name.endswith(f".{module}") for module in modules)


def read_model_shape(source: str, kind: Kind, key: str) -> ModelShape:
    """Reads the sizes of a causal language model ("policy") or of a value model from its local folder.

    A value model has no output layer, and a head with one label, which the folder may lack. `source` is the folder,
    `key` the configuration key that has it, for errors.

    Raises:
        UnknownShape: the model is not in a local folder, or the folder lacks a size or the weights.
        ConfigError: a file of the folder is incomplete.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise UnknownShape(f"{source} is not in a local folder")
    description = read_json(folder / "config.json")
    config = description | description.get("text_config", {})
    missing = [names[0] for size, names in _NAMES.items() if _find(config, size) is None]
    if missing:
        raise UnknownShape(f"{folder / 'config.json'} lacks {missing[0]}")
    shapes = read_tensor_shapes(folder, key)
    if not shapes:
        raise UnknownShape(f"{folder} holds no safetensors weights")
    return _model_shape(description, config, shapes, kind)


def read_tensor_shapes(folder: Path, key: str) -> dict[str, tuple[int, ...]]:
    """Reads the shape of each tensor, by name, from the headers of a model's safetensors files; {} without such files.

    Raises:
        ConfigError: a file is incomplete, or the index names a file that does not exist.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    with config_errors(ValueError, before=f"{key}: "):
        for file in weight_files(folder):
            shapes.update(_shapes_in(file))
    return shapes


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Reads the tensor shapes in a safetensors file; ValueError if the header is unreadable or the file cut short."""
    try:
        with safe_open(file, framework="numpy") as tensors:  # type: ignore[no-untyped-call]
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is torn: it has {file.stat().st_size} bytes ({error})") from error


def _weights_by_name(shapes: Shapes, kind: Kind, hidden: int, *, is_tied: bool) -> dict[str, int]:
    """Returns the number of weights of each tensor that the model is loaded with, by the tensor's name.

    A policy leaves out the head of a value model, and an output layer that is tied, so that it counts once. A value
    model leaves out the output layer; a head that the folder lacks has `hidden` weights and a bias, for one label.
    """
    left_out: tuple[str, ...] = _VALUE_HEADS if kind == "policy" else _OUTPUT_LAYERS
    if is_tied:
        left_out += _OUTPUT_LAYERS
    counts = {name: prod(shape) for name, shape in shapes.items() if not name.startswith(left_out)}
    if kind == "value" and not any(name.startswith(_VALUE_HEADS) for name in counts):
        counts["score.weight"] = hidden + 1
    return counts


def _model_shape(description: Mapping[str, Any], config: Mapping[str, Any], shapes: Shapes, kind: Kind) -> ModelShape:
    """Returns the sizes of a model, from config.json and the shapes of its tensors.

    `description` is the whole of config.json, `config` the same with the part about text on top. If neither says
    whether the output layer is tied to the embedding, it is where the files have none.
    """
    has_output_layer = any(name.startswith(_OUTPUT_LAYERS) for name in shapes)
    tie = description.get("tie_word_embeddings", config.get("tie_word_embeddings", not has_output_layer))
    is_tied = kind == "policy" and (bool(tie) or not has_output_layer)
    hidden = _find(config, "hidden") or 0
    counts = _weights_by_name(shapes, kind, hidden, is_tied=is_tied)
    layers: Counter[str] = Counter()
    for name, count in counts.items():
        if in_layer := _IN_A_LAYER.match(name):
            layers[in_layer.group()] += count
    heads = _find(config, "heads") or 1  # as for the other sizes: `read_model_shape` refuses a model without them
    num_layers = _find(config, "layers") or 0
    head_dim = config.get("head_dim") or hidden // heads
    total = sum(counts.values())
    return ModelShape(
        num_parameters=total,
        layer_parameters=max(layers.values(), default=0),
        root_parameters=total - sum(layers.values()),
        num_layers=num_layers,
        hidden=hidden,
        intermediate=_intermediate(config, hidden),
        attention=heads * head_dim,
        key_values=(config.get("num_key_value_heads") or heads) * head_dim,
        head_dim=head_dim,
        vocabulary=_find(config, "vocabulary") or 0,
        is_gated=any(part in name for name in shapes for part in _GATES),
        is_tied=is_tied,
        windows=_windows(config, num_layers),
        experts_per_token=config.get("num_experts_per_tok") or 0,
        head_parameters=sum(count for name, count in counts.items() if name.startswith(_VALUE_HEADS)),
        linear_widths={
            name.removesuffix(".weight"): sum(shape)
            for name, shape in shapes.items()
            if is_linear(name, shape) and _IN_A_LAYER.match(name)
        },
    )


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Returns True for the weight of a linear layer: experts are packed, and what chooses them is none."""
    return len(shape) == 2 and not any(part in name for part in _OF_EXPERTS)


def _find(config: Mapping[str, Any], size: str) -> int | None:
    return next((config[name] for name in _NAMES[size] if isinstance(config.get(name), int)), None)


def _intermediate(config: Mapping[str, Any], hidden: int) -> int:
    """Returns the width of a layer's MLP; for a mixture of experts, of all experts that one token uses together."""
    per_token = config.get("num_experts_per_tok")
    width = config.get("moe_intermediate_size")
    if per_token and width:
        shared = config.get("shared_expert_intermediate_size") or width * (config.get("n_shared_experts") or 0)
        return int(per_token * width + shared)
    return int(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden) * int(per_token or 1)


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    kinds = config.get("layer_types") or ["full_attention"] * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
