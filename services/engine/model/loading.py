"""Loads models from Hugging Face folders: the policy, the value model, the frozen reference and the reward model."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from services.engine.model.adapters import base_parameters
from services.engine.model.attention import ATTENTION, keep_attention
from services.engine.model.compiled import not_compiled
from services.engine.model.forward import RESPONSE_METHOD, response_log_probs, response_scores, response_values
from services.engine.model.linear import use_fp32_head, use_onednn
from services.engine.model.vision import use_attention
from services.engine.model.vision_value_model import as_value_model
from services.engine.model.weights import UNREADABLE, Kind, auto_model, load_weights
from splitppo.config.sections.models import Checkpointing, is_dropout
from splitppo.config_error import sentence_of
from splitppo.images.settings import FAMILIES, read_image_settings
from splitppo.model_folder import GENERATION_CONFIG, eos_token_ids, local_folder

# The fewest and the most pixels that an image is resized to; None: those of the model's folder.
PixelLimits = tuple[int | None, int | None]

_FOLDER_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_RESPONSE_METHODS: dict[Kind, Callable[..., Any]] = {
    "policy": response_log_probs,
    "value": response_values,
    "reward": response_scores,
}


def resolve_folder(name: str) -> Path:
    """Finds the folder of a model by its path, or downloads the model of a hub name; ValueError for neither."""
    return local_folder(name, _FOLDER_FILES)


def describe_architecture(model: Any) -> str:
    """Describes a model's type and sizes as text, without adapters; equal texts can load each other's weights."""
    text = model.config.get_text_config()
    sizes = {name: getattr(text, name, None) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    named = ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)
    num_parameters = sum(parameter.numel() for parameter in base_parameters(model).values())
    return f"{model.config.model_type} with {named}, {num_parameters} parameters"


def build_model(
    name: str,
    kind: Kind,
    *,
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: Checkpointing = False,
    fp32_head: bool = False,
    override_config: Mapping[str, Any] = MappingProxyType({}),
    pixel_limits: PixelLimits = (None, None),
) -> PreTrainedModel:
    """Builds a Hugging Face model without weights: parameters are on the meta device, buffers on the CPU.

    `fp32_head` makes the logits of a policy float32 whatever its weights are. `override_config` replaces attributes of
    the folder's config. The model is in eval mode, with all dropout 0 and a `RESPONSE_METHOD`. Its `image_settings` say
    how it reads images, with `pixel_limits` in place of those of the folder; None if it does not. A policy is a causal
    language model; a value model is a token classifier with one label; a reward model is a decoder that classifies
    sequences, and its folder has one label. A policy or value model may also be one that reads images: then it is a
    model that makes text of images and text, as a value model with one label in place of each token's logit. A
    `Strategy` then gives the weights memory, `fill_model` their values.

    Raises:
        ValueError: no model has this name and kind; or a replaced attribute is unknown, or changes shapes.
    """
    folder = resolve_folder(name)
    hf_logging.set_verbosity_error()
    try:
        config = _read_config(folder, kind)
        model = _without_weights(config, kind, dtype)
        image_settings = None
        if config.model_type in FAMILIES and kind != "reward":
            smallest, largest = pixel_limits
            image_settings = read_image_settings(folder, min_pixels=smallest, max_pixels=largest)
        if override_config:
            shapes = _shapes(model)
            model = _without_weights(_overridden(folder, config, override_config), kind, dtype)
            if changed := shapes ^ _shapes(model):
                names = ", ".join(override_config)
                raise ValueError(f"override_config ({names}) changes the weights: {min(changed)[0]}")
        if kind == "policy" and (end_ids := eos_token_ids(folder / GENERATION_CONFIG)):
            model.generation_config = GenerationConfig(eos_token_id=end_ids)
        set_attention(model, generation=False)
        if kind == "reward" and not isinstance(getattr(model, "score", None), nn.Linear):
            raise ValueError(f"expected a decoder with a linear head `score`, {type(model).__name__} has none")
    except Exception as error:  # wrong sizes in a config may raise anything in transformers
        raise unusable(name, kind, error) from error
    _set_computation(model, gradient_checkpointing, fp32_head=fp32_head and kind == "policy")
    model.image_settings = image_settings
    setattr(model, RESPONSE_METHOD, MethodType(_RESPONSE_METHODS[kind], model))
    return model.eval()


def _set_computation(model: PreTrainedModel, checkpointing: Checkpointing, *, fp32_head: bool) -> None:
    """Decides how a model computes: without dropout, and what its backward pass keeps or computes again.

    With `fp32_head` the logits are float32. On a CPU linear layers use oneDNN, see `use_onednn`.

    With `checkpointing` each layer is computed again in the backward pass; "selective" keeps what attention has
    computed.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if checkpointing:
        keeps = {"context_fn": keep_attention} if checkpointing == "selective" else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **keeps})
    use_onednn(model)
    if fp32_head:
        use_fp32_head(model)


def fill_model(model: Any, name: str, kind: Kind) -> None:
    """Loads a folder's weights into a model of `build_model`, sharded or not; a missing value head is 0.

    Raises:
        ValueError: the weights are missing, torn, or do not fit.
    """
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()  # load_weights checks all that the load report warns of
    try:
        load_weights(model, resolve_folder(name), kind)
    except UNREADABLE as error:
        raise unusable(name, kind, error) from error


def supports_packing(model: Any) -> bool:
    """Returns True if a model can use the attention ATTENTION: full or sliding-window layers, no soft-capped scores.

    A model that transformers does not compute with sdpa has an attention with more to it, such as sinks.
    """
    config = model.config.get_text_config()
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and bool(getattr(model, "_supports_sdpa", False))
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}
        and not getattr(config, "attn_logit_softcapping", None)
    )


def set_attention(model: Any, *, generation: bool) -> None:
    """Switches a model's attention to sdpa for generation, which needs masks, or to ATTENTION for training.

    A model without `supports_packing` stays as it was loaded (eager).
    """
    if supports_packing(model):
        use_attention(model, "sdpa" if generation else ATTENTION)


@contextmanager
def for_generation(model: Any) -> Iterator[Any]:
    """Gives a `with` block the model with the attention for generation (`set_attention`), and no compiled code."""
    set_attention(model, generation=True)
    try:
        with not_compiled():
            yield model
    finally:
        set_attention(model, generation=False)


def _read_config(folder: Path, kind: Kind) -> PreTrainedConfig:
    """Reads the config of a model that can be of this kind; ValueError for another one."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    mapping = auto_model(config, kind)._model_mapping  # noqa: SLF001 # it has the text model of some with images
    if "vision_config" in config.sub_configs and type(config) not in mapping:
        expected = "text models" if kind == "reward" else f"text models, {' and '.join(FAMILIES)}"
        raise ValueError(f"it is a vision-language model ({config.model_type}); expected one of {expected}")
    if kind == "reward" and config.num_labels != 1:
        raise ValueError(f"expected a sequence classifier with one label, it has {config.num_labels}")
    return config


def _overridden(folder: Path, config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns a model's config with changed attributes; transformers converts their values as those of config.json."""
    described, _ = PreTrainedConfig.get_config_dict(folder)
    for name in changes:
        if name not in described and not hasattr(config, name):
            nearest = difflib.get_close_matches(name, vars(config), n=1)
            hint = f" (did you mean {nearest[0]}?)" if nearest else ""
            raise ValueError(f"override_config: {config.model_type} has no attribute {name!r}{hint}")
    try:
        return type(config).from_dict({**described, **changes})
    except StrictDataclassError as error:
        raise ValueError(f"override_config: {sentence_of(error)}") from error


def _without_weights(config: PreTrainedConfig, kind: Kind, dtype: torch.dtype) -> PreTrainedModel:
    """Builds a model of a kind from its config, without dropout, and with its parameters on the meta device."""
    _switch_off_dropout(config)
    if kind == "value":  # one number per token, from a head without dropout
        config.num_labels = 1
        config.classifier_dropout = 0.0
    with _parameters_on_meta():
        model: PreTrainedModel = auto_model(config, kind).from_config(config, dtype=dtype, attn_implementation="eager")
        if kind == "value" and config.model_type in FAMILIES:
            as_value_model(model)
    model.config.architectures = [type(model).__name__]  # a value model often begins with a policy's folder
    return model


def _shapes(model: nn.Module) -> set[tuple[str, tuple[int, ...]]]:
    return {(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()}


def _switch_off_dropout(config: Any) -> None:
    """Sets all dropout rates of a config and its inner configs to 0."""
    for key, value in list(vars(config).items()):
        if isinstance(value, float) and is_dropout(key):
            setattr(config, key, 0.0)
        if isinstance(value, PreTrainedConfig):
            _switch_off_dropout(value)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Puts the parameters of modules made in the `with` block on the meta device; buffers are computed as usual."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # else it is tied to one that is registered already
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def unusable(name: str, kind: Kind, error: Exception) -> ValueError:
    """Makes the error for a model that cannot be used: its name, and the reason in one sentence."""
    return ValueError(f"{name} is not a usable Hugging Face {kind} model: {sentence_of(error)}")
