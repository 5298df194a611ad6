"""Loading models: dropout, new heads, dtypes, and mistakes in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
)

from services.engine.exchange import saved_buffers
from services.engine.model import weight_files, weights
from services.engine.model.loading import build_model, fill_model
from services.engine.model.weights import Kind
from services.engine.weights_digest import weights_digest
from tests.support.engines import load_model
from tests.support.models import save_experts, save_policy, save_value_model


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def value_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_value_model(tmp_path_factory.mktemp("models") / "value")


def head(model) -> torch.Tensor:
    return model.get_parameter("score.weight").detach()


def test_value_model_has_no_dropout_even_where_its_folder_asks_for_it(value_model: Path, tmp_path: Path) -> None:
    config = json.loads((value_model / "config.json").read_text()) | {
        "classifier_dropout": 0.3,
        "attention_dropout": 0.2,
    }
    for file in value_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(str(tmp_path), "value").train()
    assert [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)] == [0.0]
    assert {getattr(module, "attention_dropout", 0.0) for module in model.modules()} == {0.0}


@pytest.mark.parametrize(("kind", "folder"), [("policy", "policy"), ("value", "value_model")])
def test_attributes_of_the_config_are_replaced_and_computed_with(
    kind: Kind, folder: str, request: pytest.FixtureRequest
) -> None:
    name, tokens = str(request.getfixturevalue(folder)), torch.arange(3, 11)[None]
    rope = {"rope_type": "default", "rope_theta": 50.0}
    plain = load_model(name, kind)
    model = load_model(name, kind, override_config={"max_position_embeddings": 4096, "rope_parameters": rope})
    assert (model.config.max_position_embeddings, model.config.rope_parameters["rope_theta"]) == (4096, 50.0)
    assert not torch.equal(model(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            {"max_positon_embeddings": 4096},
            "override_config: qwen2 has no attribute 'max_positon_embeddings' (did you mean max_position_embeddings?)",
        ),
        ({"num_hidden_layers": 1}, "num_hidden_layers"),  # in the words of transformers, as are the last two
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "changes the weights: model.layers.1."),
        ({"hidden_size": 64}, "override_config (hidden_size) changes the weights: model.embed_tokens.weight"),
        ({"hidden_size": 3}, ""),
        ({"max_position_embeddings": "long"}, "max_position_embeddings"),
    ],
)
def test_an_attribute_that_is_unknown_or_shapes_weights_is_one_sentence(
    policy: Path, override: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{policy} is not a usable .* policy model: ") as caught:
        load_model(str(policy), override_config=override)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_dropout_of_other_architectures_is_off_too(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=30, n_embd=8, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.5, attn_pdrop=0.5)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "policy").train()
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_a_router_adds_no_noise_in_training(tmp_path: Path) -> None:
    model = load_model(str(save_experts(tmp_path / "model", "mixtral", router_jitter_noise=0.5))).train()
    assert {module.jitter_noise for module in model.modules() if hasattr(module, "jitter_noise")} == {0.0}
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_a_new_value_head_is_zero_and_all_other_weights_are_those_of_the_folder(policy: Path) -> None:
    model = load_model(str(policy), "value")
    assert not head(model).any()
    assert not model.get_parameter("score.bias").any()
    assert torch.equal(model.get_input_embeddings().weight, load_model(str(policy)).get_input_embeddings().weight)


def test_head_of_a_token_classifier_folder_is_kept(value_model: Path) -> None:
    stored = load_file(value_model / "model.safetensors")
    assert stored["score.weight"].any()
    assert torch.equal(head(load_model(str(value_model), "value")), stored["score.weight"])


def test_weights_are_fp32_whatever_the_folder_has(policy: Path, tmp_path: Path) -> None:
    load_model(str(policy), "policy").bfloat16().save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in load_model(str(tmp_path), "policy").parameters()} == {torch.float32}


def test_weights_in_many_files_and_pieces_are_those_of_one(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = AutoModelForCausalLM.from_pretrained(policy)
    whole.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    monkeypatch.setattr(weight_files, "PIECE_BYTES", 1000)
    assert weights_digest(load_model(str(tmp_path))) == weights_digest(whole)


@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_model_computes_what_transformers_own_does(tmp_path: Path, tied: bool) -> None:
    folder = save_policy(tmp_path, tie_word_embeddings=tied)
    tokens = torch.arange(3, 20)[None]
    expected = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()(tokens).logits
    model = load_model(str(folder))
    model.set_attn_implementation("eager")
    assert torch.equal(model(tokens).logits, expected)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


def test_weights_that_transformers_converts_are_converted(tmp_path: Path) -> None:
    """The output layer has another name in files than in the model."""
    sizes = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    whole = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=2))
    whole.save_pretrained(tmp_path)
    assert "embed_out.weight" in load_file(tmp_path / "model.safetensors")
    assert weights_digest(load_model(str(tmp_path))) == weights_digest(whole)


@pytest.fixture(params=["qwen3_moe", "mixtral"])
def experts(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_experts(tmp_path / "experts", request.param)


@pytest.mark.parametrize("prefix", ["model.", ""])  # files of a base model lack it
def test_experts_that_lie_one_by_one_in_files_are_stacked_without_a_whole_model(
    experts: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = weights_digest(AutoModelForCausalLM.from_pretrained(experts))
    stored = load_file(experts / "model.safetensors")
    save_file(
        {name.replace("model.", prefix): tensor for name, tensor in stored.items()}, experts / "model.safetensors"
    )
    monkeypatch.setattr(weights, "auto_model", None)  # with which transformers would convert
    monkeypatch.setattr(weight_files, "PIECE_BYTES", 1000)
    assert weights_digest(load_model(str(experts))) == whole


def test_experts_that_are_stacked_in_files_stay_so(experts: Path) -> None:
    model = load_model(str(experts))
    save_file(dict(model.state_dict()), experts / "model.safetensors")
    assert weights_digest(load_model(str(experts))) == weights_digest(model)


def test_buffers_can_be_loaded_without_the_weights(tmp_path: Path) -> None:
    folder = save_experts(tmp_path, "glm4_moe")
    model = build_model(str(folder), "policy")
    fill_model(model, str(folder), "policy")
    assert all(parameter.is_meta for parameter in model.parameters())
    (name, buffer), *_ = saved_buffers(model).items()
    assert name.endswith("e_score_correction_bias")
    assert torch.equal(buffer, load_file(folder / "model.safetensors")[name])


LAYER = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({f"{LAYER}.2.up_proj.weight": None}, f"expected {LAYER}.2.up_proj.weight in its weights, found none"),
        ({f"{LAYER}.3.down_proj.weight": None}, f"{LAYER}.down_proj has shape [3, 32, 48], expected [4, 32, 48]"),
        ({f"{LAYER}.4.down_proj.weight": (32, 48)}, f"{LAYER}.down_proj has shape [5, 32, 48], expected [4, 32, 48]"),
        (
            {f"{LAYER}.0.gate_proj.weight": (48, 31)},
            f"expected experts of the same shapes for {LAYER}.gate_up_proj, found different ones",
        ),
    ],
)
def test_experts_that_are_incomplete_are_one_sentence(
    changes: dict[str, tuple[int, ...] | None], sentence: str, tmp_path: Path
) -> None:
    file = save_experts(tmp_path, "qwen3_moe") / "model.safetensors"
    changed = {name: None if shape is None else torch.zeros(shape) for name, shape in changes.items()}
    tensors = load_file(file) | changed
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(ValueError, match=f"^{tmp_path} is not a usable Hugging Face policy model: ") as caught:
        load_model(str(tmp_path))
    assert str(caught.value).endswith(f": {sentence}")


def with_own_head(policy: Path, folder: Path, *, sharded: bool = False, **config: Any) -> torch.Tensor:
    """Copies a folder whose config ties the output layer, and adds another output layer to the weights."""
    stored = load_file(policy / "model.safetensors")
    head = torch.randn(stored["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(1))
    described = json.loads((policy / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | config))
    if sharded:
        save_file(stored, folder / "rest.safetensors")
        save_file({"lm_head.weight": head}, folder / "head.safetensors")
        weight_map = {**dict.fromkeys(stored, "rest.safetensors"), "lm_head.weight": "head.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        save_file({**stored, "lm_head.weight": head}, folder / "model.safetensors")
    return head


@pytest.mark.parametrize("sharded", [False, True])
def test_an_own_output_layer_that_the_config_ties_is_refused_not_dropped(
    policy: Path, tmp_path: Path, sharded: bool
) -> None:
    with_own_head(policy, tmp_path, sharded=sharded)
    expected = "its weights have other values in lm_head.weight than in model.embed_tokens.weight, but by its config"
    with pytest.raises(ValueError, match=f"^{tmp_path} is not a usable Hugging Face policy model: {expected}"):
        load_model(str(tmp_path))


def test_a_head_of_its_own_is_used_by_a_config_that_does_not_tie_it(policy: Path, tmp_path: Path) -> None:
    head = with_own_head(policy, tmp_path, tie_word_embeddings=False)
    assert torch.equal(load_model(str(tmp_path)).get_parameter("lm_head.weight"), head)


def test_a_value_model_needs_no_output_layer_whatever_it_holds(policy: Path, tmp_path: Path) -> None:
    with_own_head(policy, tmp_path)
    assert weights_digest(load_model(str(tmp_path), "value")) == weights_digest(load_model(str(policy), "value"))


def test_an_output_layer_that_is_stored_twice_with_the_same_values_is_tied(policy: Path, tmp_path: Path) -> None:
    stored = load_file(policy / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    (tmp_path / "config.json").write_bytes((policy / "config.json").read_bytes())
    save_file(stored, tmp_path / "model.safetensors")
    assert weights_digest(load_model(str(tmp_path))) == weights_digest(load_model(str(policy)))


def test_a_single_file_beside_an_index_of_others_is_refused(policy: Path, tmp_path: Path) -> None:
    with_own_head(policy, tmp_path, sharded=True)
    (tmp_path / "model.safetensors").symlink_to(policy / "model.safetensors")
    with pytest.raises(ValueError, match=r"has model\.safetensors and, by model\.safetensors\.index\.json, weights in"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not valid JSON: "),
        ("[1]", "expected a JSON object, got list"),
        ('{"eos_token_id": "</s>"}', 'expected eos_token_id to be a token id or a list of them, got "</s>"'),
        ('{"eos_token_id": [1, [2]]}', "expected eos_token_id to be a token id or a list of them, got [1, [2]]"),
        ('{"eos_token_id": true}', "expected eos_token_id to be a token id or a list of them, got true"),
    ],
)
def test_a_generation_config_without_readable_ends_is_one_sentence(
    policy: Path, tmp_path: Path, content: str, sentence: str
) -> None:
    (tmp_path / "config.json").write_bytes((policy / "config.json").read_bytes())
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match="is not a usable Hugging Face policy model") as caught:
        build_model(str(tmp_path), "policy")
    assert sentence in str(caught.value)
    assert str(tmp_path / "generation_config.json") in str(caught.value)


def test_a_folder_without_safetensors_is_one_sentence(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((policy / "config.json").read_bytes())
    torch.save(load_model(str(policy)).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"expected its weights in model\.safetensors or .*, found neither$"):
        load_model(str(tmp_path))


def test_weights_of_another_shape_are_one_sentence(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(policy / "model.safetensors")
    config = json.loads((policy / "config.json").read_text()) | {"intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"mlp\.\w+\.weight has shape \[64, 32\], expected \[32, 32\]$"):
        load_model(str(tmp_path))


def test_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model folder .*/nowhere does not exist$"):
        load_model(str(tmp_path / "nowhere"), "policy")


def test_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a usable Hugging Face policy model: .+") as error:
        load_model(str(tmp_path), "policy")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "kind", "expected"),
    [
        (Qwen2VLConfig, "policy", "text models, qwen2_5_vl and qwen3_vl"),
        (Qwen2VLConfig, "value", "text models, qwen2_5_vl and qwen3_vl"),
        (Qwen2_5_VLConfig, "reward", "text models"),
    ],
)
def test_a_vision_language_model_that_cannot_be_of_this_kind_is_one_sentence(
    config: type[PreTrainedConfig], kind: Kind, expected: str, tmp_path: Path
) -> None:
    config(num_labels=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf": it is a vision-language model \(\w+\); expected one of {expected}$"):
        load_model(str(tmp_path), kind)


def test_torn_weights_are_one_sentence(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((policy / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((policy / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ValueError, match="is not a usable Hugging Face policy model") as error:
        load_model(str(tmp_path), "policy")
    assert "\n" not in str(error.value)


def test_policy_from_a_folder_without_a_language_model_head_is_refused(tmp_path: Path) -> None:
    folder = save_value_model(tmp_path / "untied", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lacks weights of Qwen2ForCausalLM: lm_head\.weight"):
        load_model(str(folder), "policy")


def test_token_classifier_with_several_labels_is_refused_as_value_model(tmp_path: Path) -> None:
    folder = save_value_model(tmp_path / "labels", num_labels=3)
    with pytest.raises(ValueError, match="is not a usable Hugging Face value model") as error:
        load_model(str(folder), "value")
    assert "\n" not in str(error.value)
