"""Checks the files of a LoRA adapter in peft's format, with which training is to begin, without torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from splitppo.config.sections.models import TrainedModelConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Fields of peft's LoraConfig that make the adapter another function of its weights, or give it other weights.
_UNSUPPORTED = (
    *("use_dora", "use_rslora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out"),
    *("rank_pattern", "alpha_pattern", "layer_replication", "target_parameters", "trainable_token_indices"),
    *("alora_invocation_tokens", "arrow_config", "velora_config", "monteclora_config", "kasa_config"),
)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")  # values of init_lora_weights


def check_adapter(folder: Path, role: str, config: TrainedModelConfig) -> None:
    """Checks that the adapter in `folder` is plain LoRA, with the rank and alpha of the configuration.

    Raises:
        ValueError: it is not, or files are missing; one sentence that names keys of section `role`.
    """
    key = f"{role}.lora_adapter_path"
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{key}: {folder} has no {name}")
    try:
        adapter: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        kind, rank, alpha = (adapter.get(name) for name in ("peft_type", "r", "lora_alpha"))
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{key}: {folder / ADAPTER_CONFIG} is no JSON object") from error
    if kind != "LORA":
        raise ValueError(f"{key} has peft_type {kind}, expected LORA")
    if rank != config.lora_rank:
        raise ValueError(f"{key} has rank {rank}, {role}.lora_rank is {config.lora_rank}; set it to {rank}")
    if alpha != config.lora_alpha:
        raise ValueError(f"{key} has lora_alpha {alpha}, {role}.lora_alpha is {config.lora_alpha:g}; set it to {alpha}")
    if used := _unsupported(adapter, heads=("score", "classifier") if role == "critic" else ()):
        raise ValueError(f"{key} uses {used}, which is not supported")


def _unsupported(adapter: Mapping[str, Any], heads: Sequence[str]) -> str | None:
    """Returns what an adapter has beside A and B of plain LoRA and the value heads `heads`; None if nothing."""
    init, bias = str(adapter.get("init_lora_weights")), adapter.get("bias", "none")
    saved = [name for name in adapter.get("modules_to_save") or () if name not in heads]
    used = {name: name for name in _UNSUPPORTED if adapter.get(name)}
    if init.lower().startswith(_CHANGES_BASE):
        used["init"] = f"init_lora_weights {init}"
    if bias != "none":
        used["bias"] = f"bias {bias}"
    if saved:
        used["saved"] = f"modules_to_save ({', '.join(saved)})"
    return next(iter(used.values()), None)
