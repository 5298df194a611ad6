"""Models that read images compute and learn what transformers' own forward does, however rows are put together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from services.engine import export
from services.engine.forward_proof import attention_of
from services.engine.frozen_model import FrozenModel
from services.engine.model.adapters import trained_parameters
from services.engine.model.attention import ATTENTION
from services.engine.model.loading import for_generation
from services.engine.model.vision import vision_tower
from services.engine.model.weights import Kind
from services.engine.train_engine import TrainEngine
from services.engine.weights_digest import weights_digest
from services.rollout.hf_backend.grouped_attention import grouped_attention
from splitppo.batch import Batch
from splitppo.images.columns import images_of_row
from tests.support.adapters import OPTIONS
from tests.support.engines import CPU, forward_of, gradients, load_model, loss_of, make_engine, relative_error, silent
from tests.support.image_rows import FILES, IMAGES_OF_ROWS, Plain, make_image_batch
from tests.support.vision_models import FAMILIES, Family, load_processor, save_vision_policy

KINDS: tuple[Kind, ...] = ("policy", "value")
OUTPUTS = {"policy": "log_probs", "value": "values"}
TOGETHER: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {"use_remove_padding": False},
    "packed in threes": {"ppo_micro_batch_size_per_gpu": 3},
    "row by row": {"ppo_micro_batch_size_per_gpu": 1},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of both families, whose output layer is not their embedding."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_vision_policy(folder / family, family, tie_word_embeddings=False)
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_policy(tmp_path_factory.mktemp("models") / "tied")


def computed(engine: TrainEngine, batch: Batch) -> list[np.ndarray]:
    name = OUTPUTS[engine.kind]
    return engine.compute(batch, forward_of(engine.kind), outputs=(name,), progress=silent)[name].rows()


def plain_model(engine: TrainEngine) -> Plain:
    """The model of an engine as transformers has it; that of a value model has its head as the output layer."""
    folder = Path(engine.config.model)
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    if engine.kind == "value":
        model.lm_head = torch.nn.Linear(engine.model.score.in_features, 1, bias=False)
        model.lm_head.weight.data.copy_(engine.model.score.weight.detach())
    return Plain(model, folder)


def step(engine: TrainEngine, batch: Batch) -> None:
    engine.update(batch, forward_of(engine.kind), loss_of(engine.kind), progress=silent)


def whole(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.whole_weights(torch.float32)}


# Forward passes.


@pytest.mark.promise("the model of transformers")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_transformers_for_each_row_alone(models: Path, family: Family, kind: Kind) -> None:
    """Text rows are beside rows with one image and several, and responses have sampled image tokens.

    In float64, because log-probs of -5 are rounded by up to 1e-6 in float32, in any two ways of computing them.
    """
    batch = make_image_batch(models / family)
    plain = plain_model(make_engine(models / family, kind))
    plain.model.double()
    with torch.no_grad():
        if kind == "policy":
            expected = [plain.log_probs(batch, row, 0.7).numpy() for row in range(batch.num_rows)]
        else:
            expected = [plain.values(batch, row).numpy() for row in range(batch.num_rows)]
    for how, settings in TOGETHER.items():
        engine = make_engine(models / family, kind, **settings)
        engine.model.double()
        found = computed(engine, batch)
        for row, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
            np.testing.assert_allclose(actual, wanted, atol=1e-6, rtol=0, err_msg=f"{how}, row {row}")


@pytest.mark.parametrize("family", FAMILIES)
def test_images_change_what_is_computed_and_a_row_without_images_is_a_row_of_text(models: Path, family: Family) -> None:
    engine = make_engine(models / family)
    batch = make_image_batch(models / family, [(0,), (), (3,)])
    other = batch.merge(make_image_batch(models / family, [(3,), (), (0,)]).select(["images", "image_sizes"]))
    found, swapped = computed(engine, batch), computed(engine, other)
    assert np.abs(found[0] - swapped[0]).max() > 1e-3
    assert np.abs(found[2] - swapped[2]).max() > 1e-3
    without_columns = batch.select(["prompts", "responses"]).take(np.array([1]))
    np.testing.assert_allclose(computed(engine, without_columns)[0], found[1], atol=1e-6)


def test_a_reference_computes_what_the_policy_does_before_its_first_step(models: Path) -> None:
    batch = make_image_batch(models / "qwen3_vl")
    engine = make_engine(models / "qwen3_vl")
    reference = FrozenModel(engine.config, device=CPU)
    found = reference.compute(batch, forward_of("policy"), outputs=("log_probs",), progress=silent)["log_probs"]
    for actual, expected in zip(found.rows(), computed(engine, batch), strict=True):
        assert np.array_equal(actual, expected)


@contextmanager
def counted_patches(engine: TrainEngine) -> Iterator[list[int]]:
    """Counts the patches of each call of the vision tower."""
    counts: list[int] = []
    tower = vision_tower(engine.model)
    assert tower is not None
    handle = tower.register_forward_pre_hook(lambda _, inputs: counts.append(len(inputs[0])))
    try:
        yield counts
    finally:
        handle.remove()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_tower_computes_each_image_of_a_micro_batch_once(models: Path, checkpointing: bool) -> None:
    model = models / "qwen2_5_vl"
    batch = make_image_batch(model)
    files = {
        bytes(image.data): image.rows * image.columns
        for files, sizes in zip(batch["images"].rows(), batch["image_sizes"].rows(), strict=True)
        for image in images_of_row(files, sizes)
    }
    assert files.keys() == {*FILES}
    engine = make_engine(model, gradient_checkpointing=checkpointing)
    with counted_patches(engine) as counts:
        computed(engine, batch)
        gradients(engine, batch)
    assert counts == [sum(files.values())] * 2
    with counted_patches(engine) as counts:
        computed(engine, make_image_batch(model, [(), ()]))
        gradients(engine, make_image_batch(model, [(), ()]))
    assert counts == []


# Gradients.


def expected_gradients(engine: TrainEngine, batch: Batch) -> dict[str, Tensor]:
    """Gradients of the loss of `loss_of` by transformers, row by row, in float64, by the names of the engine."""
    plain = plain_model(engine)
    plain.model.double()
    mask = batch["response_mask"].rows()
    num_tokens = sum(int(of_row.sum()) for of_row in mask)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(batch.num_rows):
        outputs = plain.logits(batch, row)
        if engine.kind == "policy":
            log_probs = (outputs / 0.7).log_softmax(-1)
            targets = torch.from_numpy(batch["responses"].rows()[row].astype(np.int64))
            entropy = -(log_probs.exp() * log_probs).sum(-1)
            advantages = torch.from_numpy(batch["advantages"].rows()[row])
            loss = -advantages * log_probs.gather(-1, targets[:, None]).squeeze(-1) - 0.1 * entropy
        else:
            loss = 0.5 * (outputs.squeeze(-1) - torch.from_numpy(batch["returns"].rows()[row])) ** 2
        total = total + (torch.from_numpy(mask[row]) * loss).sum() / num_tokens
    total.backward()
    found = {name: weight.grad for name, weight in plain.model.named_parameters()}
    if engine.kind == "value":
        found["score.weight"] = found.pop("lm_head.weight")
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.promise("the model of transformers")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers_for_each_row_alone(models: Path, family: Family, kind: Kind) -> None:
    """In float64, because rounding in float32 makes differences of 2e-6 between any two ways of computing them."""
    batch = make_image_batch(models / family, samples_image_tokens=False)
    expected: dict[str, Tensor] = {}
    for settings in (*TOGETHER.values(), {"gradient_checkpointing": True}, {"gradient_checkpointing": "selective"}):
        engine = make_engine(models / family, kind, freeze_vision_tower=False, **settings)
        expected = expected or expected_gradients(engine, batch)
        engine.model.double()
        assert relative_error(gradients(engine, batch), expected) <= 1e-6
    assert any(".visual." in name for name in expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_stays_as_it_was_and_all_else_learns_as_without_it(
    models: Path, family: Family, kind: Kind
) -> None:
    batch = make_image_batch(models / family)
    trained = make_engine(models / family, kind, freeze_vision_tower=False)
    learning = gradients(trained, batch)
    engine = make_engine(models / family, kind, weight_decay=0.1)
    found = gradients(engine, batch)
    assert found.keys() == {name for name in learning if ".visual." not in name}
    assert relative_error(found, {name: learning[name] for name in found}) <= 1e-6
    before = whole(engine)
    for _ in range(2):
        step(engine, batch)
    after = whole(engine)
    for name, weight in after.items():
        assert torch.equal(weight, before[name]) == (".visual." in name), name
    states = {name for name, weight in engine.model.named_parameters() if weight in engine.optimizer.state}
    assert states == found.keys()
    assert engine.num_trainable_parameters == sum(before[name].numel() for name in states)
    before = whole(trained)
    step(trained, batch)
    # What the tower adds after the last layer of the text reaches no other token, so that has no gradient.
    reached = {name for name, gradient in learning.items() if gradient.any()}
    assert reached <= {name for name, weight in whole(trained).items() if not torch.equal(weight, before[name])}
    assert any(".visual." in name for name in reached)


def test_weights_of_a_tower_that_learns_have_a_gradient_of_0_where_no_row_has_an_image(models: Path) -> None:
    for family in FAMILIES:
        engine = make_engine(models / family, freeze_vision_tower=False)
        of_tower = {
            name: gradient
            for name, gradient in gradients(engine, make_image_batch(models / family, [(), ()])).items()
            if ".visual." in name
        }
        assert of_tower.keys() == {name for name, _ in engine.model.named_parameters() if ".visual." in name}
        assert not any(gradient.any() for gradient in of_tower.values())


# Attention.


def attentions(model: Any) -> tuple[str, str]:
    """The attention of the language model and that of the tower."""
    return model.config.text_config._attn_implementation, model.config.vision_config._attn_implementation


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_language_model_gets_another_attention(models: Path, family: Family) -> None:
    engine = make_engine(models / family)
    assert attentions(engine.model) == (ATTENTION, "sdpa")
    with engine.gathered() as model:
        assert attentions(model) == ("sdpa", "sdpa")
        with grouped_attention(model):
            assert attentions(model) == ("splitppo-grouped", "sdpa")
        assert attentions(model) == ("sdpa", "sdpa")
    assert attentions(engine.model) == (ATTENTION, "sdpa")
    with attention_of(engine.model, "eager"), for_generation(engine.model):
        assert attentions(engine.model) == ("sdpa", "sdpa")
    with attention_of(engine.model, "eager"):
        pass
    assert attentions(engine.model) == (ATTENTION, "sdpa")


# Loading.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_transformers_and_a_new_head_is_0(models: Path, family: Family, kind: Kind) -> None:
    model = load_model(str(models / family), kind)
    own = AutoModelForImageTextToText.from_pretrained(models / family)
    expected = {name: weight for name, weight in own.named_parameters() if kind == "policy" or name != "lm_head.weight"}
    found = dict(model.named_parameters())
    heads = {"score.weight"} if kind == "value" else set()
    assert found.keys() == expected.keys() | heads
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert not any(found[name].any() for name in heads)


def test_files_with_older_and_newer_names_are_read_without_a_whole_model(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published files of Qwen2.5-VL have the older ones."""
    from safetensors.torch import save_file

    model = models / "qwen2_5_vl"
    older = load_file(model / "model.safetensors")
    assert {name.split(".")[0] for name in older} == {"visual", "model", "lm_head"}
    assert not any(name.startswith(("model.visual", "model.language_model")) for name in older)
    expected = weights_digest(load_model(str(model)))
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "model.safetensors").unlink()
    newer = dict(load_model(str(model)).named_parameters())
    save_file({name: weight.detach() for name, weight in newer.items()}, tmp_path / "model.safetensors")
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", None)
    assert weights_digest(load_model(str(model))) == weights_digest(load_model(str(tmp_path))) == expected


def test_weights_that_are_missing_are_one_sentence(models: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for file in (models / "qwen3_vl").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "model.safetensors").unlink()
    stored = load_file(models / "qwen3_vl" / "model.safetensors")
    del stored["model.visual.blocks.1.attn.qkv.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks weights of Qwen3VL\w+: model\.visual\.blocks\.1\.attn\.qkv\.weight$"):
        load_model(str(tmp_path))


# Checkpoints.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_engine_goes_on_bit_for_bit_and_exports_are_models_of_transformers(
    models: Path, tmp_path: Path, family: Family, kind: Kind
) -> None:
    model = models / family
    batch = make_image_batch(model)
    engine = make_engine(model, kind)
    step(engine, batch)
    saved = engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=True).result(60)
    assert saved == engine.compute_weights_digest()
    expected = whole(engine)
    export.export(tmp_path / "part", tmp_path / "export")
    for folder in (tmp_path / "part" / "huggingface", tmp_path / "export"):
        own = dict(AutoModelForImageTextToText.from_pretrained(folder).named_parameters())
        assert all(torch.equal(own[name], weight) for name, weight in expected.items() if name != "score.weight")
        assert ("score.weight" in load_file(folder / "model.safetensors")) == (kind == "value")
        exported = make_engine(folder, kind)
        for actual, wanted in zip(computed(exported, batch), computed(engine, batch), strict=True):
            assert np.array_equal(actual, wanted)
        assert load_processor(folder).image_processor.patch_size == load_processor(model).image_processor.patch_size
    step(engine, batch)
    again = make_engine(model, kind)
    again.load_checkpoint(tmp_path / "part")
    step(again, batch)
    assert again.compute_weights_digest() == engine.compute_weights_digest()


def test_a_tied_output_layer_stays_tied_in_what_is_exported(tied: Path, tmp_path: Path) -> None:
    engine = make_engine(tied)
    step(engine, make_image_batch(tied))
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(60)
    export.export(tmp_path / "part", tmp_path / "export")
    own = AutoModelForImageTextToText.from_pretrained(tmp_path / "export")
    assert own.lm_head.weight is own.get_input_embeddings().weight
    assert torch.equal(own.lm_head.weight, whole(engine)["model.language_model.embed_tokens.weight"])


def test_a_checkpoint_in_which_the_tower_has_learned_is_refused_where_it_is_frozen(
    models: Path, tmp_path: Path
) -> None:
    engine = make_engine(models / "qwen3_vl", freeze_vision_tower=False)
    step(engine, make_image_batch(models / "qwen3_vl"))
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(60)
    with pytest.raises(ValueError, match=r"has moments of model\.visual\.\S+, which `freeze_vision_tower` keeps"):
        make_engine(models / "qwen3_vl").load_checkpoint(tmp_path / "part")


# Adapters.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_leaves_out_a_frozen_tower(models: Path, family: Family, kind: Kind) -> None:
    batch = make_image_batch(models / family)
    engine = make_engine(models / family, kind, **OPTIONS)
    assert not any(".visual." in name for name in trained_parameters(engine.model))
    before = whole(engine)
    step(engine, batch)
    for name, weight in whole(engine).items():
        if ".visual." in name:
            assert torch.equal(weight, before[name]), name
    with_tower = trained_parameters(make_engine(models / family, kind, freeze_vision_tower=False, **OPTIONS).model)
    assert any(".visual.blocks.0.mlp." in name for name in with_tower)
    assert any(".visual.merger." in name for name in with_tower)


def test_layers_of_a_frozen_tower_get_no_adapter_by_their_names(models: Path) -> None:
    """In Qwen2.5-VL they share the names of the language model's."""
    model = models / "qwen2_5_vl"
    adapters = trained_parameters(make_engine(model, target_modules=["q_proj", "up_proj"], **OPTIONS).model)
    assert {name.split(".")[1] for name in adapters} == {"language_model"}
    assert sum("up_proj.lora_A" in name for name in adapters) == 2
    with pytest.raises(ValueError, match=r"actor\.target_modules: qkv is no linear layer of Qwen2_5_VL"):
        make_engine(model, target_modules=["qkv"], **OPTIONS)
    adapters = trained_parameters(
        make_engine(model, target_modules=["qkv"], freeze_vision_tower=False, **OPTIONS).model
    )
    assert {name.split(".")[1] for name in adapters} == {"visual"}


def test_adapters_are_exported_for_the_model_that_they_belong_to(models: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    model = models / "qwen2_5_vl"
    engine = make_engine(model, **OPTIONS)
    step(engine, make_image_batch(model))
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(60)
    export.export(tmp_path / "part", tmp_path / "adapter", adapter=True)
    export.export(tmp_path / "part", tmp_path / "merged")
    base: Any = AutoModelForImageTextToText.from_pretrained(model)
    by_peft = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    for (name, weight), (_, expected) in zip(merged.named_parameters(), by_peft.named_parameters(), strict=True):
        torch.testing.assert_close(weight, expected, atol=1e-6, rtol=0, msg=name)


# Mistakes.


def test_an_image_that_cannot_be_decoded_is_named_by_its_digest(models: Path) -> None:
    import xxhash

    batch = make_image_batch(models / "qwen3_vl", [(0,)])
    [files] = batch["images"].rows()
    torn = files.copy()
    torn[len(torn) // 2 :] = 0
    damaged = Batch.from_rows(images=[torn], image_sizes=batch["image_sizes"].rows())
    name = xxhash.xxh3_128_hexdigest(torn)
    with pytest.raises(ValueError, match=rf"^image {name} is truncated"):
        computed(make_engine(models / "qwen3_vl"), batch.merge(damaged))


def test_an_image_of_another_size_than_was_counted_is_refused(models: Path) -> None:
    batch = make_image_batch(models / "qwen3_vl", [(0,)])
    [sizes] = batch["image_sizes"].rows()
    num_bytes, rows, columns = sizes.tolist()
    other = Batch.from_rows(images=batch["images"].rows(), image_sizes=[[num_bytes, columns, rows]])
    with pytest.raises(
        ValueError, match=rf"^image \w+ is {rows}×{columns} patches here, {columns}×{rows} were counted$"
    ):
        computed(make_engine(models / "qwen3_vl"), batch.merge(other))


def test_rows_with_images_are_not_divided_among_ranks(models: Path) -> None:
    from services.engine.inference import check_sequence_ranks

    model = FrozenModel(make_engine(models / "qwen3_vl").config, device=CPU)
    config = make_engine(models / "qwen3_vl").config
    with pytest.raises(ValueError, match=r"^ulysses_sequence_parallel_size \(2\): \S+ reads images, whose rows ranks "):
        check_sequence_ranks(config, model.model, model.limits, 2)


def test_a_model_without_image_settings_is_one_sentence(models: Path, tmp_path: Path) -> None:
    for file in (models / "qwen3_vl").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"is not a usable .*preprocessor_config\.json does not exist[^\n]*$"):
        load_model(str(tmp_path))


def test_limits_of_pixels_take_the_place_of_those_of_the_folder(models: Path) -> None:
    folder = models / "qwen2_5_vl"
    described = json.loads((folder / "preprocessor_config.json").read_text())
    model = load_model(str(folder), pixel_limits=(None, 5000))
    assert (model.image_settings.min_pixels, model.image_settings.max_pixels) == (described["min_pixels"], 5000)


def test_rows_of_these_tests_have_images_in_common() -> None:
    assert len({*IMAGES_OF_ROWS}) < len(IMAGES_OF_ROWS)
