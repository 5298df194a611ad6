"""Layers that can have no adapter, and adapters that do not fit: one sentence each, which names the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.adapters import OPTIONS, save_adapter
from tests.support.engines import make_engine
from tests.support.models import save_policy, save_value_model

HAS = "no linear layer of Qwen2ForCausalLM; it has q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"


@pytest.fixture(scope="module")
def value(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_value_model(tmp_path_factory.mktemp("models") / "value")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"target_modules": ["q_prj"]}, f"actor.target_modules: q_prj is {HAS}"),
        ({"target_modules": "q_proj"}, f"actor.target_modules: q_proj matches {HAS}"),
        ({"target_modules": ["embed_tokens"]}, f"actor.target_modules: embed_tokens is {HAS}"),
        ({"exclude_modules": ["up"]}, f"actor.exclude_modules: up is {HAS}"),
        (
            {"target_modules": ".*"},
            "actor.target_modules: lm_head cannot have an adapter (its logits are made in chunks)",
        ),
        (
            {"exclude_modules": ".*"},
            "actor.target_modules without actor.exclude_modules leaves no linear layer of Qwen2ForCausalLM",
        ),
    ],
)
def test_layers_that_cannot_have_an_adapter_are_refused(model: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        make_engine(model, **OPTIONS, **settings)
    assert str(refused.value) == sentence


def test_a_pattern_of_layers_that_this_model_does_not_have_excludes_none(model: Path) -> None:
    without = make_engine(model, **OPTIONS, exclude_modules=".*visual.*").num_trainable_parameters
    assert without == make_engine(model, **OPTIONS).num_trainable_parameters


def test_a_value_head_is_trained_whole_and_has_no_adapter(value: Path) -> None:
    with pytest.raises(ValueError) as refused:
        make_engine(value, "value", **OPTIONS, target_modules=["score"])
    assert str(refused.value) == "critic.target_modules: score cannot have an adapter (it is trained whole)"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"r": 8}, "has rank 8, actor.lora_rank is 4; set it to 8"),
        ({"lora_alpha": 16}, "has lora_alpha 16, actor.lora_alpha is 8; set it to 16"),
        ({"use_dora": True}, "uses use_dora, which is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "uses rank_pattern, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "uses modules_to_save ['lm_head'], which is not supported"),
        ({"init_lora_weights": "pissa"}, "uses init_lora_weights pissa, which is not supported"),
        ({"bias": "all"}, "uses bias 'all', which is not supported"),
        ({"peft_type": "IA3"}, "has peft_type 'IA3', expected LORA"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    adapter = save_adapter(tmp_path / "adapter", model, "policy")
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ValueError) as refused:
        make_engine(model, **OPTIONS, lora_adapter_path=str(adapter))
    assert str(refused.value) == f"actor.lora_adapter_path {fault}"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"r": "4"}, "r: Input should be a valid integer"),
        ({"lora_alpha": float("nan")}, "lora_alpha: Input should be a finite number"),
        ({"modules_to_save": 5}, "modules_to_save: Input should be a valid array"),
    ],
)
def test_a_description_of_wrong_types_is_one_sentence(
    model: Path, tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    file = save_adapter(tmp_path / "adapter", model, "policy") / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ValueError) as refused:
        make_engine(model, **OPTIONS, lora_adapter_path=str(file.parent))
    assert str(refused.value) == f"actor.lora_adapter_path: {file} describes no adapter: {fault}"
    file.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="describes no adapter: Invalid JSON: recursion limit exceeded"):
        make_engine(model, **OPTIONS, lora_adapter_path=str(file.parent))


def test_a_tensor_beside_a_and_b_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", model, "policy")
    file, name = adapter / "adapter_model.safetensors", "base_model.model.model.embed_tokens.weight"
    save_file({**load_file(file), name: torch.ones(2, 2)}, file)
    with pytest.raises(ValueError, match=r"adapter holds 'model\.embed_tokens\.weight', which is not supported"):
        make_engine(model, **OPTIONS, lora_adapter_path=str(adapter))


def test_an_adapter_of_other_layers_is_refused_with_its_layers(model: Path, tmp_path: Path) -> None:
    adapter = str(save_adapter(tmp_path / "adapter", model, "policy", target_modules=["q_proj", "v_proj"]))
    with pytest.raises(ValueError, match=r"set target_modules to the layers of the adapter \(\[q_proj, v_proj\]\)"):
        make_engine(model, **OPTIONS, lora_adapter_path=adapter)
    make_engine(model, **OPTIONS, lora_adapter_path=adapter, target_modules=["q_proj", "v_proj"])


def test_an_adapter_of_another_model_is_refused_with_both_shapes(model: Path, tmp_path: Path) -> None:
    adapter = str(save_adapter(tmp_path / "adapter", model, "policy"))
    large = save_policy(tmp_path / "large", hidden_size=64)
    shapes = r"actor\.lora_adapter_path: model\.layers.*lora_B.weight has shape \[32, 4\], expected \[64, 4\]"
    with pytest.raises(ValueError, match=shapes):
        make_engine(large, **OPTIONS, lora_adapter_path=adapter)


def test_an_adapter_whose_weights_are_missing_or_torn_is_refused(model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", model, "policy")
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"actor\.lora_adapter_path: cannot read .*adapter_model\.safetensors: "):
        make_engine(model, **OPTIONS, lora_adapter_path=str(adapter))
    file.unlink()
    with pytest.raises(ValueError, match=r"actor\.lora_adapter_path: .*adapter has no adapter_model\.safetensors"):
        make_engine(model, **OPTIONS, lora_adapter_path=str(adapter))
