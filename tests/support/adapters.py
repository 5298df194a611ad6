"""LoRA adapters of tiny models that peft has made, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.support.seeds import shifted

OPTIONS: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8}


def save_adapter(folder: Path, base: Path, kind: str, **changes: Any) -> Path:
    """Writes an adapter for a model in which no weight is zero, by peft, with `OPTIONS`; returns the folder."""
    from peft import LoraConfig, get_peft_model

    auto: Any = AutoModelForCausalLM if kind == "policy" else AutoModelForTokenClassification
    settings = {"task_type": "CAUSAL_LM" if kind == "policy" else "TOKEN_CLS", "target_modules": "all-linear"}
    if kind == "value":
        settings["exclude_modules"] = "score"
    described = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **{**settings, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(shifted(3))
        get_peft_model(auto.from_pretrained(base), described).save_pretrained(str(folder))
    return folder
