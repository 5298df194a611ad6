"""Weights that `freeze` names: bit-equal after training, without gradient and moments, in everything that leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.engine import export
from services.engine.model.adapters import base_parameters, trained_parameters
from services.engine.train_engine import TrainEngine
from services.engine.weights_digest import values_digest
from tests.support.adapters import OPTIONS, save_adapter
from tests.support.engines import forward_of, gradients, loss_of, make_batch, make_engine, relative_error, silent
from tests.support.models import save_policy, save_value_model

BATCH = make_batch(num_mini_batches=2)
ATTENTION = r"\.self_attn\."


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_policy(folder / "policy")
    save_policy(folder / "untied", tie_word_embeddings=False)
    save_value_model(folder / "value")
    return folder


def step(engine: TrainEngine) -> dict[str, float]:
    return engine.update(BATCH, forward_of(engine.kind), loss_of(engine.kind), progress=silent).metrics


def whole(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine.whole_weights(torch.float32)}


def digest(weights: dict[str, torch.Tensor], part: str) -> str:
    return values_digest(weight for name, weight in weights.items() if part in name)


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        {"optimizer_state_dtype": "bf16"},
        {"param_offload": True, "optimizer_offload": True},
        {"use_remove_padding": False},
    ],
    ids=str,
)
def test_frozen_weights_end_as_they_began_and_all_others_learn(
    models: Path, kind: str, settings: dict[str, Any]
) -> None:
    engine = make_engine(models / "policy", kind, freeze=[ATTENTION], weight_decay=0.1, **settings)
    before = whole(engine)
    for _ in range(2):
        step(engine)
    after = whole(engine)
    assert digest(after, ".self_attn.") == digest(before, ".self_attn.")
    for name, weight in after.items():
        assert torch.equal(weight, before[name]) == (".self_attn." in name), name
    states = {name for name, weight in engine.model.named_parameters() if weight in engine.optimizer.state}
    assert states == {name for name in before if ".self_attn." not in name}
    assert engine.num_trainable_parameters == sum(before[name].numel() for name in states) < engine.num_parameters


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_gradients_of_the_others_are_those_without_frozen_weights(
    models: Path, kind: str, checkpointing: bool | str
) -> None:
    frozen = ["embed_tokens", r"layers\.0\."]
    engine = make_engine(models / "untied", kind, freeze=frozen, gradient_checkpointing=checkpointing)
    expected = gradients(make_engine(models / "untied", kind), BATCH)
    found = gradients(engine, BATCH)
    assert found.keys() == {name for name in expected if "embed_tokens" not in name and "layers.0." not in name}
    assert relative_error(found, {name: expected[name] for name in found}) <= 1e-6


class KeptForBackward:
    """Counts the bytes that autograd keeps."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_bytes += tensor.nbytes
        return tensor


def kept_bytes(engine: TrainEngine) -> int:
    kept = KeptForBackward()
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
        gradients(engine, BATCH)
    return kept.num_bytes


def test_layers_below_the_lowest_that_learns_keep_nothing_for_the_backward_pass(models: Path) -> None:
    lower = ["embed_tokens", r"layers\.0\."]
    all_learn, head_alone, upper = (
        kept_bytes(make_engine(models / "untied", "value", freeze=freeze)) for freeze in ([], [r"^model\."], lower)
    )
    assert head_alone < 0.1 * all_learn
    assert upper == pytest.approx(0.5 * all_learn, rel=0.1)


def test_frozen_weights_have_no_gradient_and_no_moments_in_memory(models: Path) -> None:
    def num_bytes(**settings: Any) -> int:
        engine = make_engine(models / "policy", **settings)
        step(engine)
        gradients(engine, BATCH)
        states = [tensor for state in engine.optimizer.state.values() for tensor in state.values() if tensor.ndim]
        made = [weight.grad for weight in engine.model.parameters() if weight.grad is not None]
        return sum(tensor.nbytes for tensor in (*states, *made))

    engine = make_engine(models / "policy", freeze=[ATTENTION])
    num_frozen = engine.num_parameters - engine.num_trainable_parameters
    assert num_bytes() - num_bytes(freeze=[ATTENTION]) == 12 * num_frozen > 0


def test_a_tied_weight_is_frozen_by_each_of_its_names(models: Path) -> None:
    for name in ("embed_tokens", "lm_head"):
        engine = make_engine(models / "policy", freeze=[name])
        assert "model.embed_tokens.weight" not in trained_parameters(engine.model)
    learning = trained_parameters(make_engine(models / "untied", freeze=["lm_head"]).model)
    assert "model.embed_tokens.weight" in learning
    assert "lm_head.weight" not in learning


def test_a_new_value_head_learns_and_one_of_the_folder_can_be_frozen(models: Path) -> None:
    learning = trained_parameters(make_engine(models / "policy", "value", freeze=[r"^(?!model\.layers)"]).model)
    assert {"score.weight", "score.bias"} < learning.keys()
    assert "model.norm.weight" not in learning
    engine = make_engine(models / "value", "value", freeze=["^score"])
    assert not {"score.weight", "score.bias"} & trained_parameters(engine.model).keys()


# Checkpoints.


@pytest.mark.parametrize("settings", [{}, {"param_offload": True}, {"optimizer_state_dtype": "bf16"}], ids=str)
def test_a_resumed_engine_goes_on_bit_for_bit_and_checkpoint_and_export_are_whole(
    models: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    settings = {"freeze": [ATTENTION], **settings}
    engine = make_engine(models / "policy", **settings)
    step(engine)
    assert engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=True).result(30) == (
        engine.compute_weights_digest()
    )
    expected = whole(engine)
    export.export(tmp_path / "part", tmp_path / "export")
    for folder in (tmp_path / "part" / "huggingface", tmp_path / "export"):
        found = load_file(folder / "model.safetensors")
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    step(engine)
    again = make_engine(models / "policy", **settings)
    again.load_checkpoint(tmp_path / "part")
    step(again)
    assert again.compute_weights_digest() == engine.compute_weights_digest()


def test_frozen_weights_at_rest_are_those_of_the_checkpoint_that_was_loaded(models: Path, tmp_path: Path) -> None:
    other = save_policy(tmp_path / "other", seed=9)
    engine = make_engine(other, freeze=[ATTENTION])
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    loaded = make_engine(models / "policy", freeze=[ATTENTION], param_offload=True)
    loaded.load_checkpoint(tmp_path / "part")
    assert loaded.compute_weights_digest() == engine.compute_weights_digest()


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["all weights", "adapters"])
def test_a_checkpoint_with_moments_of_weights_that_are_frozen_here_is_refused(
    models: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    engine = make_engine(models / "policy", **options)
    step(engine)
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    frozen = make_engine(models / "policy", freeze=["mlp.*(proj|lora_A).weight"], **options)
    before = frozen.compute_weights_digest()
    with pytest.raises(
        ValueError, match=r"part has moments of .*mlp.*, which `freeze` keeps from learning here: resume"
    ):
        frozen.load_checkpoint(tmp_path / "part")
    assert frozen.compute_weights_digest() == before


# Adapters.


def test_of_adapters_those_that_are_named_stay_as_they_are(models: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", models / "policy", "policy")
    options = {**OPTIONS, "lora_adapter_path": str(adapter), "freeze": [ATTENTION]}
    engine = make_engine(models / "policy", **options)
    before = whole(engine)
    step(engine)
    after = whole(engine)
    for name, weight in after.items():
        assert torch.equal(weight, before[name]) == (".mlp." not in name), name
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    export.export(tmp_path / "part", tmp_path / "exported", adapter=True)
    file = "adapter_model.safetensors"
    begun, ended = load_file(adapter / file), load_file(tmp_path / "exported" / file)
    assert begun.keys() == ended.keys()
    for name in begun:
        assert torch.equal(begun[name], ended[name]) == (".self_attn." in name), name


@pytest.mark.parametrize("has_head", [False, True])
def test_a_value_head_can_be_frozen_if_the_adapter_brings_it(models: Path, tmp_path: Path, has_head: bool) -> None:
    saved = {"modules_to_save": ["score"]} if has_head else {"task_type": None}
    adapter = save_adapter(tmp_path / "adapter", models / "value", "value", **saved)
    options = {**OPTIONS, "lora_adapter_path": str(adapter), "freeze": ["lora_A", "^score"]}
    if not has_head:
        with pytest.raises(ValueError, match=r"^critic\.freeze: \^score matches no weight of the adapters of "):
            make_engine(models / "policy", "value", **options)
        return
    learning = trained_parameters(make_engine(models / "policy", "value", **options).model)
    assert all(".lora_B." in name for name in learning)


def test_a_of_all_new_adapters_may_be_frozen(models: Path) -> None:
    engine = make_engine(models / "policy", freeze=["lora_A"], **OPTIONS)
    before = {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}
    step(engine)
    learned = {name for name, weight in engine.model.named_parameters() if not torch.equal(weight, before[name])}
    assert learned == {name for name in before if ".lora_B." in name}
    assert base_parameters(engine.model).keys() & trained_parameters(engine.model).keys() == set()


# Mistakes.


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        (
            "policy",
            {"freeze": [r"\.self_atn\."]},
            r"actor.freeze: \.self_atn\. matches no weight of {model}; near is self_attn (as in"
            " model.layers.0.self_attn.k_proj.bias)",
        ),
        (
            "value",
            {"freeze": ["score"]},
            "critic.freeze: score matches no weight of {model}; parts of their names are ",
        ),
        (
            "value",
            {"freeze": ["lm_head"]},
            "critic.freeze: lm_head matches no weight of {model}; ",
        ),
        ("policy", {"freeze": [""]}, "actor.freeze freezes all weights of {model}: nothing would learn; leave some"),
        (
            "policy",
            {"freeze": ["embed_tokens"], **OPTIONS},
            "actor.freeze: embed_tokens matches no weight of the adapters of {model}; ",
        ),
        (
            "policy",
            {"freeze": [ATTENTION], **OPTIONS},
            "actor.freeze freezes model.layers.0.self_attn.k_proj.lora_B.weight, which is 0 in a new adapter: it would"
            " never change anything; actor.exclude_modules leaves adapters out",
        ),
    ],
)
def test_what_cannot_be_frozen_is_one_sentence(
    models: Path, kind: str, settings: dict[str, Any], sentence: str
) -> None:
    model = models / "policy"
    with pytest.raises(ValueError) as refused:
        make_engine(model, kind, **settings)
    assert str(refused.value).startswith(sentence.replace("{model}", str(model)))
