"""Checks the files of a LoRA adapter in peft's format, with which training is to begin, without torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splitppo.config.sections.models import TrainedModelConfig

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NAME_PREFIX = "base_model.model."  # of each weight in peft's files

# Fields of peft's LoraConfig that make the adapter another function of its weights, or give it other weights.
_UNSUPPORTED = (
    *("use_dora", "use_rslora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out"),
    *("rank_pattern", "alpha_pattern", "layer_replication", "target_parameters", "trainable_token_indices"),
    *("alora_invocation_tokens", "arrow_config", "velora_config", "monteclora_config", "kasa_config"),
)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")  # values of init_lora_weights


class _AdapterConfig(BaseModel):
    """The fields of adapter_config.json that are checked; all others are in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True)

    peft_type: str
    rank: Annotated[int, Field(alias="r")]
    lora_alpha: Annotated[float, Field(allow_inf_nan=False)]
    modules_to_save: list[str] | None = None
    bias: str | None = None


def check_adapter(folder: Path, role: str, config: TrainedModelConfig) -> None:
    """Checks that the adapter in `folder` is plain LoRA, with the rank and alpha of the configuration.

    Raises:
        ValueError: it is not, or files are missing; one sentence that names keys of section `role`.
    """
    key = f"{role}.lora_adapter_path"
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{key}: {folder} has no {name}")
    file = folder / ADAPTER_CONFIG
    try:
        adapter = _AdapterConfig.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{key}: cannot read {file}: {error.strerror}") from error
    except ValidationError as error:
        wrong = error.errors()[0]
        field = "".join(f"{part}: " for part in wrong["loc"][:1])
        raise ValueError(f"{key}: {file} describes no adapter: {field}{wrong['msg']}") from error
    if adapter.peft_type != "LORA":
        raise ValueError(f"{key} has peft_type {adapter.peft_type!r}, expected LORA")
    for name, own, found in (("rank", "lora_rank", adapter.rank), ("lora_alpha", "lora_alpha", adapter.lora_alpha)):
        if found != (wanted := getattr(config, own)):
            raise ValueError(f"{key} has {name} {found:g}, {role}.{own} is {wanted:g}; set it to {found:g}")
    if used := _unsupported(adapter, heads=("score", "classifier") if role == "critic" else ()):
        raise ValueError(f"{key} uses {used}, which is not supported")


def _unsupported(adapter: _AdapterConfig, heads: Sequence[str]) -> str | None:
    """Returns what an adapter has beside A and B of plain LoRA and the value heads `heads`; None if nothing."""
    others = adapter.model_extra or {}
    init = str(others.get("init_lora_weights"))
    saved = [name for name in adapter.modules_to_save or () if name not in heads]
    is_used = {name: others.get(name) for name in _UNSUPPORTED}
    is_used[f"init_lora_weights {init}"] = init.lower().startswith(_CHANGES_BASE)
    is_used[f"bias {adapter.bias!r}"] = adapter.bias not in (None, "none")
    is_used[f"modules_to_save {saved}"] = saved
    return next(filter(is_used.get, is_used), None)
