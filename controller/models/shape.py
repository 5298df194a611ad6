"""Reads the sizes of a model from config.json and the headers of its safetensors files, without reading weights."""

import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
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
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
TIED_OUTPUT_LAYER = "lm_head.weight"  # its name in a model whose files have the embedding alone
_IN_A_LAYER = re.compile(r".*?\.\d+(?=\.)")
_OF_EXPERTS = (".experts.", ".gate.weight")
_OF_TOWERS = ("visual.", "model.visual.")  # older files have the first
_GATES = ("gate_proj", "gate_up_proj", ".experts.0.w3.")
# Names of weights in the vision towers of Qwen2.5-VL and Qwen3-VL.
_WIDENS = ("blocks.0.mlp.gate_proj.weight", "blocks.0.mlp.linear_fc1.weight")
_NARROWS = ("merger.mlp.2.weight", "merger.linear_fc2.weight")
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
class TowerShape:
    """The sizes of the part of a model that reads images, as those of a `ModelShape`, of which its weights are a part.

    A tower with gated MLPs has norms that keep their input in fp32, as a language model; others have layer norms.
    """

    num_parameters: int
    num_layers: int
    hidden: int
    intermediate: int
    patch_dim: int  # values of a patch
    merged: int  # patches that become a token of the language model
    num_mergers: int  # layers whose features go to the language model
    is_gated: bool
    learns: bool = True


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a transformer as the engine builds it: numbers of weights, and widths of activations."""

    num_parameters: int  # tied weights count once
    layer_parameters: int  # in the largest decoder layer
    root_parameters: int  # in no decoder layer: embedding, last norm, output layer, a vision tower
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
    linear_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # linear layers: outputs, inputs
    weights: Mapping[str, int] = field(default_factory=dict)  # numbers by name in files, without a new value head
    num_base: int = 0  # weights under adapters
    num_frozen: int = 0  # weights that are not trained, those under adapters among them
    trains_norms: bool = True
    trains_embedding: bool = True
    trains_output_layer: bool = True
    num_layers_below: int = 0  # layers below all weights that learn
    experts_per_token: int = 0  # 0: not a mixture of experts
    adapter_outputs: int = 0  # numbers that a token has in the adapters of a decoder layer, between A and B
    tower: TowerShape | None = None  # None: the model reads text alone

    @property
    def num_trained(self) -> int:
        """The number of weights that the optimizer updates."""
        return self.num_parameters - self.num_frozen

    @property
    def num_saved(self) -> int:
        """The number of weights in a checkpoint: all but those under adapters."""
        return self.num_parameters - self.num_base

    def as_trained(self, trained: TrainedModelConfig) -> "ModelShape":
        """Returns the shape of this model with the adapters of `trained`, and without a gradient for what it freezes.

        With adapters all other weights but the value head are frozen, without `freeze_vision_tower` a tower has some.
        """
        adapters = adapter_sizes(self.linear_shapes, trained)
        shape = self._with_adapters(adapters, trained.lora_rank) if trained.lora_rank else self
        freezes_tower = self.tower is not None and trained.freeze_vision_tower
        if self.tower is not None:
            shape = replace(shape, tower=replace(self.tower, learns=not freezes_tower))
        if not trained.freeze and (trained.lora_rank or not freezes_tower):
            return shape
        heads = {name: size for name, size in self.weights.items() if name.startswith(_VALUE_HEADS)}
        names = adapters | heads if trained.lora_rank else self.weights
        tied_name = next(iter(self.embedding_names), None) if self.is_tied else None
        frozen = {
            name
            for name in names
            for pattern in trained.freeze
            if re.search(pattern, name) or (name == tied_name and re.search(pattern, TIED_OUTPUT_LAYER))
        }
        if freezes_tower:
            frozen |= {name for name in names if _is_of_tower(name)}
        shape = replace(shape, num_frozen=shape.num_frozen + sum(names[name] for name in frozen))
        return shape if trained.lora_rank else replace(shape, **self._without_gradients(frozen))

    @property
    def embedding_names(self) -> list[str]:
        """The names of the input embedding in files; empty if it has no name that is known."""
        return [name for name in self.weights if name.endswith(EMBEDDINGS)]

    def _with_adapters(self, sizes: Mapping[str, int], rank: int) -> "ModelShape":
        of_layers = {name: size for name, size in sizes.items() if not _is_of_tower(name)}
        in_layers = sum(of_layers.values())
        adapters = sum(sizes.values())
        base = self.num_parameters - self.head_parameters
        return replace(
            self,
            num_parameters=self.num_parameters + adapters,
            layer_parameters=self.layer_parameters + in_layers // self.num_layers,
            root_parameters=self.root_parameters + adapters - in_layers,
            num_base=base,
            num_frozen=base,
            trains_norms=False,
            trains_embedding=False,
            trains_output_layer=False,
            adapter_outputs=rank * len(of_layers) // 2 // self.num_layers,  # each layer has A and B
        )

    def _without_gradients(self, frozen: set[str]) -> dict[str, Any]:
        """Returns the fields of the shape that say where a backward pass of this model makes and keeps nothing."""
        layers: dict[str, bool] = {}  # whether a layer learns, first layers first
        for name in sorted(self.weights, key=_layer_number):
            if in_layer := _in_decoder_layer(name):
                layers[in_layer.group()] = layers.get(in_layer.group(), False) or name not in frozen
        trains_embedding = not frozen.issuperset(self.embedding_names or ["unknown"])
        outputs = [name for name in self.weights if name.startswith(_OUTPUT_LAYERS)]
        norms = [name for name in self.weights if "norm" in name or ".ln_" in name]
        return {
            "trains_norms": not frozen.issuperset(norms),
            "trains_embedding": trains_embedding,
            "trains_output_layer": trains_embedding if self.is_tied else not frozen.issuperset(outputs),
            "num_layers_below": 0 if trains_embedding else len([*takewhile(operator.not_, layers.values())]),
        }


def adapter_sizes(linear_shapes: Mapping[str, tuple[int, ...]], trained: TrainedModelConfig) -> dict[str, int]:
    """Returns the number of weights of both parts of each adapter, by name: lora_rank x inputs, lora_rank x outputs."""
    return {
        f"{name}.lora_{part}.weight": trained.lora_rank * width
        for name, (outputs, inputs) in linear_shapes.items()
        if _has_adapter(name, trained)
        for part, width in (("A", inputs), ("B", outputs))
    }


def _layer_number(name: str) -> int:
    """Returns the number of the decoder layer in the name of a weight; -1 for a weight in no layer."""
    in_layer = _in_decoder_layer(name)
    return int(in_layer.group().rpartition(".")[2]) if in_layer else -1


def _in_decoder_layer(name: str) -> re.Match[str] | None:
    """Finds the decoder layer in the name of a weight, e.g. model.layers.3; None for a weight in no such layer."""
    return None if _is_of_tower(name) else _IN_A_LAYER.match(name)


def _is_of_tower(name: str) -> bool:
    """Returns True for the name of a weight, or of an adapter, of a vision tower."""
    return name.startswith(_OF_TOWERS)


def _has_adapter(name: str, trained: TrainedModelConfig) -> bool:
    """Returns True if the linear layer gets an adapter, as peft decides; none of a frozen tower does."""
    if _is_of_tower(name) and trained.freeze_vision_tower:
        return False
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
            shapes.update(read_shapes_in(file))
    return shapes


def read_shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Reads the tensor shapes in a safetensors file; ValueError if the header is unreadable or the file cut short."""
    try:
        with safe_open(file, framework="numpy") as tensors:  # type: ignore[no-untyped-call]
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is torn: it has {file.stat().st_size} bytes ({error})") from error


def loaded_weights(shapes: Shapes, kind: Kind, *, is_tied: bool) -> dict[str, int]:
    """Returns the number of weights of each tensor of the files that the model is loaded with, by the tensor's name.

    A policy leaves out the head of a value model, and an output layer that is tied, so that it counts once. A value
    model leaves out the output layer.
    """
    left_out: tuple[str, ...] = _VALUE_HEADS if kind == "policy" else _OUTPUT_LAYERS
    if is_tied:
        left_out += _OUTPUT_LAYERS
    return {name: prod(shape) for name, shape in shapes.items() if not name.startswith(left_out)}


def has_value_head(names: Iterable[str]) -> bool:
    """Returns True if a value head is among the weights of these names."""
    return any(name.startswith(_VALUE_HEADS) for name in names)


def is_output_layer_tied(description: Mapping[str, Any], shapes: Shapes) -> bool:
    """Returns True if a policy's output layer is its embedding, by its config.json and the tensors of its files.

    If config.json, and its part about text, do not say it, the two are tied where the files have no output layer.
    """
    has_output_layer = any(name.startswith(_OUTPUT_LAYERS) for name in shapes)
    of_text = description.get("text_config", {}).get("tie_word_embeddings", not has_output_layer)
    return bool(description.get("tie_word_embeddings", of_text)) or not has_output_layer


def _model_shape(description: Mapping[str, Any], config: Mapping[str, Any], shapes: Shapes, kind: Kind) -> ModelShape:
    """Returns the sizes of a model, from config.json and the shapes of its tensors.

    `description` is the whole of config.json, `config` the same with the part about text on top. A value head that the
    folder lacks has a weight for each hidden number, and in a model of text alone a bias, for one label.
    """
    is_tied = kind == "policy" and is_output_layer_tied(description, shapes)
    hidden = _find(config, "hidden") or 0
    weights = loaded_weights(shapes, kind, is_tied=is_tied)
    is_head_new = kind == "value" and not has_value_head(weights)
    tower = _tower_shape(shapes)
    new_head = {"score.weight": hidden + (tower is None)} if is_head_new else {}
    counts = {**weights, **new_head}
    layers: Counter[str] = Counter()
    for name, count in counts.items():
        if in_layer := _in_decoder_layer(name):
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
        is_gated=any(part in name for name in shapes if not _is_of_tower(name) for part in _GATES),
        is_tied=is_tied,
        windows=_windows(config, num_layers),
        experts_per_token=config.get("num_experts_per_tok") or 0,
        head_parameters=sum(count for name, count in counts.items() if name.startswith(_VALUE_HEADS)),
        linear_shapes=linear_layers(shapes),
        weights=weights,
        tower=tower,
    )


def _tower_shape(shapes: Shapes) -> TowerShape | None:
    """Returns the sizes of a vision tower of one of the families that read images; None if there is none."""
    tower = {name.partition("visual.")[2]: shape for name, shape in shapes.items() if _is_of_tower(name)}
    if "patch_embed.proj.weight" not in tower:
        return None
    hidden, *of_patch = tower["patch_embed.proj.weight"]
    # Both families have an MLP in a block that widens, and one behind the merged patches that narrows.
    widens = next(tower[name] for name in _WIDENS if name in tower)
    narrows = next(tower[name] for name in _NARROWS if name in tower)
    return TowerShape(
        num_parameters=sum(map(prod, tower.values())),
        num_layers=len({name.split(".")[1] for name in tower if name.startswith("blocks.")}),
        hidden=hidden,
        intermediate=widens[0],
        patch_dim=prod(of_patch),
        merged=narrows[1] // hidden,
        num_mergers=1 + len({name.split(".")[1] for name in tower if name.startswith("deepstack_merger_list.")}),
        is_gated=any("gate_proj" in name for name in tower),
    )


def linear_layers(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each linear layer in a decoder layer, or in a vision tower, by its name."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if is_linear(name, shape) and (_in_decoder_layer(name) or _is_linear_of_tower(name))
    }


def _is_linear_of_tower(name: str) -> bool:
    """Returns True for a weight with two dimensions of a vision tower, but for its embedding of positions."""
    return _is_of_tower(name) and not name.endswith("pos_embed.weight")


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
