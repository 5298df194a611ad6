"""Models from Hugging Face folders: the policy, the value model and the frozen reference."""

import hashlib
import logging
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
from transformers.utils import logging as hf_logging

from services.engine.model.attention import ATTENTION
from services.engine.model.forward import RESPONSE_METHOD, response_log_probs, response_values

log = logging.getLogger(__name__)

Kind = Literal["policy", "value"]

_FOLDER_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.bin")
_HEADS = ("score", "classifier")


def resolve_folder(name: str) -> Path:
    """The local folder of a model: the path itself, or the downloaded snapshot of a hub name; ValueError: neither."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"model folder {name} does not exist")
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FOLDER_FILES)))
    except Exception as error:
        reason = _first_line(error)
        raise ValueError(f"model {name!r} is neither a folder nor available on the hub: {reason}") from error


def describe_architecture(model: Any) -> str:
    """What a model is, in words: whoever can load the weights of another one has the same."""
    sizes = {name: getattr(model.config, name, None) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    known = ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)
    return f"{model.config.model_type} with {known}, {model.num_parameters()} parameters"


def load_model(
    name: str, kind: Kind, *, seed: int = 0, dtype: torch.dtype = torch.float32, gradient_checkpointing: bool = False
) -> PreTrainedModel:
    """Loads a model on the CPU, in eval mode, with all dropout 0 and a `RESPONSE_METHOD`.

    A policy is a causal language model; a value model is a token classifier with one label, whose head is initialised
    from a generator seeded by (seed, kind) where the folder lacks it.

    Raises:
        ValueError: no such model, or its weights do not fit.
    """
    folder = resolve_folder(name)
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()  # what its load report warns of is checked below
    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForTokenClassification
    try:
        config = AutoConfig.from_pretrained(folder)
        _switch_off_dropout(config, kind)
        model, report = auto.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
        set_attention(model, generation=False)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ValueError(f"{name} is not a usable Hugging Face {kind} model: {_first_line(error)}") from error
    _initialise_head(model, sorted(report["missing_keys"]), kind=kind, seed=seed, name=name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    method = response_log_probs if kind == "policy" else response_values
    setattr(model, RESPONSE_METHOD, MethodType(method, model))
    return model.eval()


def supports_packing(model: Any) -> bool:
    """Whether our attention can stand in for the model's: full or sliding-window layers, no soft-capped scores."""
    config = model.config.get_text_config()
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}
        and not getattr(config, "attn_logit_softcapping", None)
    )


def set_attention(model: Any, *, generation: bool) -> None:
    """Switches to sdpa, which builds masks, for generation, and to ours for training; others stay as loaded (eager)."""
    if supports_packing(model):
        model.set_attn_implementation("sdpa" if generation else ATTENTION)


def _switch_off_dropout(config: Any, kind: Kind) -> None:
    for key, value in list(vars(config).items()):
        if isinstance(value, float) and key.endswith(("dropout", "_pdrop", "dropout_prob")):
            setattr(config, key, 0.0)
    if kind == "value":
        config.num_labels = 1
        config.classifier_dropout = 0.0


def _initialise_head(model: PreTrainedModel, missing: list[str], *, kind: Kind, seed: int, name: str) -> None:
    """Fills what the folder lacked: a value head; anything else is an error."""
    if lacking := [key for key in missing if kind == "policy" or not key.startswith(_HEADS)]:
        raise ValueError(f"{name} lacks weights of {type(model).__name__}: {', '.join(lacking[:3])}")
    digest = hashlib.sha256(f"{seed}/{kind}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    for key in missing:
        parameter = model.get_parameter(key)
        with torch.no_grad():
            if parameter.ndim > 1:
                parameter.normal_(0.0, getattr(model.config, "initializer_range", 0.02), generator=generator)
            else:
                parameter.zero_()
    if missing:
        log.info("%s: new value head, seed %d", name, seed)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
