"""The memory of images and of what reads them: sizes of towers, and the terms of the estimate, each worked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.memory.estimate import estimate_group
from controller.memory.plan import memory_plan
from controller.memory.terms import GIB, Terms
from controller.models.shape import ModelShape, TowerShape, read_model_shape
from services.engine.model.loading import build_model
from splitppo.config import Config
from tests.support.fake_services import make_config
from tests.support.small_estimate import MODEL as TEXT_MODEL
from tests.support.small_estimate import config, phases
from tests.support.vision_models import FAMILIES, Family, save_vision_policy

# Two blocks of hidden 3 and an MLP of 5 with a gate; patches of 12 values, four of which become a token.
TOWER = TowerShape(200, 2, 3, 5, 12, merged=4, num_mergers=1, is_gated=True)
MODEL = replace(
    TEXT_MODEL,
    layer_parameters=300,
    root_parameters=400,
    weights={"model.visual.blocks.0.mlp.up_proj.weight": 200, "model.norm.weight": 8, "model.embed_tokens.weight": 792},
    tower=TOWER,
)
# One row of 6 + 4 tokens; each of the 6 may be one of an image, and is made of four patches.
PATCHES = 4 * 6


def without_images(config: Config, model: ModelShape = MODEL) -> dict[str, Terms]:
    return phases(config, model=model, image_bytes=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_is_told_apart_from_the_decoder_layers_by_the_names_of_its_weights(
    tmp_path: Path, family: Family
) -> None:
    folder = save_vision_policy(tmp_path, family)
    shape = read_model_shape(str(folder), "policy", "actor.model")
    built = build_model(str(folder), "policy")
    tower = sum(weight.numel() for weight in built.model.visual.parameters())
    layers = sum(weight.numel() for weight in built.model.language_model.layers.parameters())
    patch = built.config.vision_config.patch_size
    mergers = 3 if family == "qwen3_vl" else 1

    assert shape.num_parameters == built.num_parameters()
    assert shape.root_parameters == built.num_parameters() - layers
    assert (shape.num_layers, shape.layer_parameters, shape.hidden) == (2, layers // 2, 32)
    assert shape.tower == TowerShape(tower, 3, 16, 32, 3 * 2 * patch**2, 4, mergers, is_gated=family == "qwen2_5_vl")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_critic_has_the_weights_that_the_engine_builds(tmp_path: Path, family: Family) -> None:
    folder = save_vision_policy(tmp_path, family)
    shape = read_model_shape(str(folder), "value", "critic.model")
    assert shape.num_parameters == build_model(str(folder), "value").num_parameters()
    assert shape.head_parameters == 32


def test_a_text_model_has_no_tower_and_images_take_nothing(tmp_path: Path) -> None:
    text = replace(MODEL, tower=None)
    assert phases(config(tmp_path), model=text) == without_images(config(tmp_path), text)
    assert phases(config(tmp_path), model=text)["backward"].images == 0


def test_a_frozen_tower_has_no_moments_and_no_gradients(tmp_path: Path) -> None:
    frozen, trained = (
        phases(config(tmp_path, actor__freeze_vision_tower=freeze), model=MODEL) for freeze in (True, False)
    )
    assert (frozen["backward"].weights, trained["backward"].weights) == (4000, 4000)
    assert (frozen["backward"].optimizer, trained["backward"].optimizer) == (8 * 800, 8 * 1000)
    assert (frozen["optimizer step"].gradients, trained["optimizer step"].gradients) == (4 * 800, 4 * 1000)


def test_a_frozen_tower_gets_no_adapters(tmp_path: Path) -> None:
    linear = {"model.visual.blocks.0.mlp.up_proj": (5, 3), "model.layers.0.mlp.up_proj": (16, 8)}
    model = replace(MODEL, linear_shapes=linear)
    adapted = {
        freeze: config(tmp_path, actor__lora_rank=2, actor__freeze_vision_tower=freeze) for freeze in (True, False)
    }
    of_text, of_tower = 2 * (16 + 8), 2 * (5 + 3)
    for freeze, num_trained in ((True, of_text), (False, of_text + of_tower)):
        shape = model.as_trained(adapted[freeze].actor)
        assert shape.num_trained == num_trained
        assert shape.layer_parameters == 300 + of_text // 2
        assert shape.root_parameters == 400 + num_trained - of_text


def test_pixels_and_features_are_beside_the_language_model(tmp_path: Path) -> None:
    beside = 4 * PATCHES * 12 + 4 * 6 * 8
    for phase in ("log-probs", "backward"):
        plain = without_images(config(tmp_path))[phase]
        with_images = phases(config(tmp_path), model=MODEL)[phase]
        assert with_images.activations - plain.activations == beside
        assert with_images.logits == plain.logits


def test_the_tower_is_the_peak_where_it_is_wide(tmp_path: Path) -> None:
    wide = replace(MODEL, tower=replace(TOWER, intermediate=5000))
    terms = phases(config(tmp_path), model=wide)
    # Pixels, the input and the MLP of a block.
    assert terms["log-probs"].activations == 4 * PATCHES * 12 + 4 * PATCHES * (2 * 3 + 3 * 5000)
    assert terms["log-probs"].logits == 0
    assert terms["backward"].activations == terms["log-probs"].activations
    # bf16 has the pixels once more.
    narrow = phases(config(tmp_path, actor__dtype="bf16"), model=wide)
    assert narrow["log-probs"].activations == 4 * PATCHES * 12 + 2 * PATCHES * (12 + 2 * 3 + 3 * 5000)
    # Two different prompts of 6 tokens are sampled at a time.
    assert terms["generate"].activations == 2 * terms["log-probs"].activations


@pytest.mark.parametrize(
    ("is_gated", "block"), [(True, 8 * 3 + 4 * (8 * 3 + 4 * 5)), (False, 4 * (8 * 3 + 2 * 5))], ids=["gated", "plain"]
)
def test_a_tower_that_learns_keeps_activations_of_its_blocks(tmp_path: Path, is_gated: bool, block: int) -> None:
    model = replace(MODEL, tower=replace(TOWER, is_gated=is_gated))

    def activations(*, freeze: bool, **changes: Any) -> int:
        settings = config(tmp_path, actor__freeze_vision_tower=freeze, **changes)
        return phases(settings, model=model)["backward"].activations

    merging = 4 * PATCHES * (3 + 1) * 3
    assert activations(freeze=False) - activations(freeze=True) == PATCHES * 2 * block + merging
    less = {"actor__gradient_checkpointing": True}
    inputs = 2 * 4 * PATCHES * 3
    assert activations(freeze=False, **less) - activations(freeze=True, **less) == inputs + PATCHES * block + merging


def test_decoded_images_and_those_in_the_slots_are_in_main_memory(tmp_path: Path) -> None:
    on_cpu = estimate_group(config(tmp_path), "actor", MODEL, image_bytes=1_000_000)
    # A step has two prompts; the next one may be in the slots beside it.
    assert {terms.images for terms in on_cpu.phases.values()} == {GIB + 2 * 2 * 1_000_000}
    on_gpu = estimate_group(config(tmp_path, services__actor__devices=[0]), "actor", MODEL, image_bytes=1_000_000)
    assert {terms.images for terms in on_gpu.phases.values()} == {0}
    assert on_gpu.saving is not None
    assert on_gpu.saving.images == GIB + 2 * 2 * 1_000_000


def test_the_plan_says_what_images_take_unless_prompts_have_none(tmp_path: Path) -> None:
    model = str(save_vision_policy(tmp_path / "model"))
    run = make_config(tmp_path / "run", actor__model=model)
    line = f"  {'images':18s}"
    assert line in str(memory_plan(run, {}))
    assert line in str(memory_plan(run, {}, image_bytes=500))
    assert line not in str(memory_plan(run, {}, image_bytes=0))
