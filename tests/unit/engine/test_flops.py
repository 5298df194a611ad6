"""Model FLOPs by hand and as PyTorch counts them, and the devices for which a share of the peak is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from services.engine.batching.packing import row_lengths
from services.engine.flops import (
    DenseShape,
    FlopsMeter,
    TowerShape,
    dense_shape,
    forward_flops,
    image_grids,
    peak_flops,
    tower_forward_flops,
    tower_train_flops,
    train_flops,
)
from services.engine.model.weights import Kind
from services.engine.token_metrics import MetricLimit, metrics_of_role
from services.engine.train_engine import TrainEngine
from splitppo.batch import Batch
from splitppo.images.columns import row_of_images
from splitppo.run_folder.metrics import check_declared
from tests.support.engines import forward_of, load_model, loss_of, make_engine, silent
from tests.support.image_rows import make_image_batch
from tests.support.models import VOCABULARY, save_experts, save_policy, tiny_config
from tests.support.vision_models import FAMILIES, VISION_VOCABULARY, Family, save_vision_policy

# By hand, of tests.support.models.tiny_config: q, k, v with bias, o; gate, up, down; two norms. Then the last norm.
LAYER = (32 * 32 + 32) + 2 * (32 * 16 + 16) + 32 * 32 + 3 * 32 * 64 + 2 * 32
BODY = 2 * LAYER + 32
WIDTH = 2 * 4 * 8


def lengths(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def test_flops_by_hand() -> None:
    # 6 * (10 * 6 tokens + 3 * 3 response tokens) + 12 * 2 * (4^2 + 2^2)
    assert train_flops(DenseShape(10, 3, 2), lengths(4, 2), lengths(1, 2)) == 6 * 69 + 480
    assert train_flops(DenseShape(10, 3, 2), lengths(), lengths()) == 0


def test_frozen_weights_get_no_gradient() -> None:
    # Of 10 and 3 weights 7 and 3 are frozen: 4 in place of 6 for each token.
    shape = DenseShape(10, 3, 2, frozen_body_parameters=7, frozen_head_parameters=3)
    assert train_flops(shape, lengths(4, 2), lengths(1, 2)) == 6 * 69 + 480 - 2 * (7 * 6 + 3 * 3)
    assert forward_flops(shape, lengths(4, 2), lengths(1, 2)) == (6 * 69 + 480) / 3


def test_frozen_and_trained_weights_are_told_apart(tmp_path: Path) -> None:
    model = load_model(str(save_policy(tmp_path)), "policy")
    model.requires_grad_(requires_grad=False)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_()
    head = 32 * len(VOCABULARY)
    assert dense_shape(model) == DenseShape(BODY, head, WIDTH, BODY - 32 * 64, head)


def test_flops_of_long_rows_are_not_cut_off_at_32_bits() -> None:
    assert train_flops(DenseShape(0, 0, 1), lengths(100_000), lengths(1)) == 12e10


@pytest.mark.parametrize("tied", [True, False])
def test_the_shape_of_a_policy_has_its_head_but_no_embeddings(tmp_path: Path, tied: bool) -> None:
    model = load_model(str(save_policy(tmp_path, tie_word_embeddings=tied)), "policy")
    assert dense_shape(model) == DenseShape(BODY, 32 * len(VOCABULARY), WIDTH)


def test_the_head_of_a_value_model_is_one_row(tmp_path: Path) -> None:
    model = load_model(str(save_policy(tmp_path)), "value")
    shape = dense_shape(model)
    assert (shape.body_parameters, shape.attention_width) == (BODY, WIDTH)
    assert shape.head_parameters in (32, 33)


def test_flops_are_what_pytorch_counts() -> None:
    config = tiny_config(hidden_size=128, intermediate_size=512, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config)
    shape = dense_shape(model)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 100, dtype=torch.int64)).logits.sum().backward()
    # Without biases and norms, which are no matrix products.
    assert train_flops(shape, lengths(100), lengths(100)) == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_a_token_meets_the_experts_that_compute_it(tmp_path: Path, architecture: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96, "num_attention_heads": 4}
    folder = save_experts(tmp_path, architecture, **sizes)
    model = load_model(str(folder))
    shape = dense_shape(model)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(100)[None] % 50).logits.sum().backward()
    assert train_flops(shape, lengths(100), lengths(100)) == pytest.approx(counter.get_total_flops(), rel=0.01)
    model.requires_grad_(requires_grad=False)
    assert dense_shape(model).frozen_body_parameters == shape.body_parameters
    assert shape.body_parameters < model.model.num_parameters() / 1.5  # two of four experts


@pytest.mark.parametrize("changes", [{"model_type": "mixtral"}, {"layer_types": ["linear_attention"] * 2}])
def test_other_models_than_dense_transformers_have_no_shape(changes: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(attn_implementation="eager"))
    if "model_type" in changes:
        model.config = AutoConfig.for_model(changes["model_type"])
    else:
        model.config.layer_types = changes["layer_types"]
    assert np.isnan(train_flops(dense_shape(model), lengths(4), lengths(2)))


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12, 67e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", np.nan, np.nan),
        ("NVIDIA GeForce GTX 1080", np.nan, np.nan),
        ("cpu", np.nan, np.nan),
    ],
)
def test_the_peak_is_known_by_a_devices_whole_name(name: str, bf16: float, fp32: float) -> None:
    assert [peak_flops(name, "bf16"), peak_flops(name, "fp32")] == pytest.approx([bf16, fp32], nan_ok=True)


# Models that read images.


def build_vision(folder: Path, family: Family, **changes: Any) -> Any:
    """A tiny model, as transformers builds it, which computes attention as matrix products that PyTorch counts."""
    config = AutoConfig.from_pretrained(save_vision_policy(folder, family, **changes))
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager")


WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("grid", [(4, 4), (6, 10), (10, 14)])
def test_the_flops_of_an_image_are_what_pytorch_counts(tmp_path: Path, family: Family, grid: tuple[int, int]) -> None:
    model = build_vision(tmp_path, family, vision=WIDE)
    tower = dense_shape(model).tower
    assert tower is not None
    rows, columns = grid
    pixels = torch.zeros(rows * columns, 3 * 2 * model.config.vision_config.patch_size**2)
    grids = np.array([grid])

    with FlopCounterMode(display=False) as counter:
        features = model.model.get_image_features(pixels, torch.tensor([[1, *grid]]), return_dict=True)
    assert tower_forward_flops(tower, grids) == pytest.approx(counter.get_total_flops(), rel=0.02)

    images = [
        *features.pooler_output,
        *(image for images in features.get("deepstack_features", ()) for image in images),
    ]
    with FlopCounterMode(display=False) as backward:
        torch.cat([image.flatten() for image in images]).sum().backward()
    # Pixels get no gradient, but are counted as if they did.
    of_pixels = 2 * model.model.visual.patch_embed.proj.weight.numel() * rows * columns
    both = counter.get_total_flops() + backward.get_total_flops() + of_pixels
    assert tower_train_flops(tower, grids) == pytest.approx(both, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_is_no_part_of_the_weights_that_tokens_meet(tmp_path: Path, family: Family) -> None:
    model = build_vision(tmp_path, family)
    shape = dense_shape(model)
    assert shape.tower is not None
    text = sum(weight.numel() for name, weight in model.model.language_model.named_parameters() if "embed" not in name)
    assert (shape.body_parameters, shape.head_parameters) == (text, 32 * len(VISION_VOCABULARY))
    assert shape.tower.patch_parameters + shape.tower.token_parameters == sum(
        weight.numel() for name, weight in model.model.visual.named_parameters() if name != "pos_embed.weight"
    )


def test_of_seven_billion_weights_the_tower_has_a_tenth() -> None:
    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    text |= {"num_key_value_heads": 4, "vocab_size": 152064}
    vision = {"hidden_size": 1280, "out_hidden_size": 3584}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision)
    with torch.device("meta"):
        shape = dense_shape(AutoModelForImageTextToText.from_config(config))
    assert shape.tower is not None
    assert shape.body_parameters == pytest.approx(6.525e9, rel=1e-3)
    assert shape.tower.patch_parameters + shape.tower.token_parameters == pytest.approx(0.677e9, rel=1e-3)
    assert (shape.tower.num_full_layers, shape.tower.num_windowed_layers) == (4, 28)


def test_pairs_of_patches_are_those_of_windows_where_a_layer_has_them() -> None:
    # 3 weights of a patch, 8 of a token of 2 x 2 patches; attention of width 5.
    tower = TowerShape(3, 8, 5, num_full_layers=1, num_windowed_layers=2, window=2, merge=2)
    # 6 x 4 patches: windows of 4 x 4 and 2 x 4. 24 x 24 pairs in the full layer, 16 x 16 + 8 x 8 in the others.
    by_hand = 2 * (3 * 24 + 8 * 6) + 4 * 5 * (576 + 2 * (256 + 64))
    assert tower_forward_flops(tower, np.array([[6, 4]])) == by_hand
    assert tower_forward_flops(tower, np.array([[6, 4], [6, 4]])) == 2 * by_hand
    assert tower_train_flops(tower, np.array([[6, 4]])) == 3 * by_hand
    assert tower_train_flops(replace(tower, learns=False), np.array([[6, 4]])) == by_hand
    partly = replace(tower, frozen_patch_parameters=1, frozen_token_parameters=8)
    assert tower_train_flops(partly, np.array([[6, 4]])) == 3 * by_hand - 2 * (1 * 24 + 8 * 6)
    assert tower_forward_flops(tower, np.empty((0, 2), np.int64)) == 0


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize("freeze", [True, False])
def test_an_update_counts_each_image_once_and_a_frozen_tower_forward_alone(
    tmp_path: Path, kind: Kind, freeze: bool
) -> None:
    folder = save_vision_policy(tmp_path)
    engine = make_engine(folder, kind, freeze_vision_tower=freeze, ppo_mini_batch_size=7)
    batch = make_image_batch(folder)
    shape = dense_shape(engine.model)
    assert shape.tower is not None
    assert shape.head_parameters == (32 if kind == "value" else 32 * len(VISION_VOCABULARY))
    rows = row_lengths(batch), batch["responses"].lengths
    # The images of (0,), (1, 2), (3,) and (2, 0, 2): those of one prompt are in several rows.
    grids = image_grids(batch, np.arange(batch.num_rows))
    assert len(grids) == 1 + 2 + 1 + 3
    forward = tower_forward_flops(shape.tower, grids)
    meter = engine.flops_meter
    assert meter.forward_flops(batch) == pytest.approx(forward_flops(shape, *rows) + forward)
    update = meter.update_flops(batch, engine.plan_update(batch))
    assert update == pytest.approx(train_flops(shape, *rows) + (1 if freeze else 3) * forward)


def test_images_that_rows_share_are_counted_once() -> None:
    first = row_of_images([(b"abc", 4, 6), (b"de", 2, 2)])
    second = row_of_images([(b"xyz", 4, 6)])
    rows = [first, first, second, row_of_images([]), first]
    batch = Batch.from_rows(images=[files for files, _ in rows], image_sizes=[sizes for _, sizes in rows])

    def grids(*of_rows: int) -> list[list[int]]:
        return sorted(image_grids(batch, np.array(of_rows, np.int64)).tolist())

    assert grids(0, 1, 2, 3, 4) == [[2, 2], [4, 6], [4, 6]]
    assert grids(4, 0) == [[2, 2], [4, 6]]
    assert grids(2) == [[4, 6]]
    assert grids(3) == grids() == []
    assert image_grids(Batch.from_rows(prompts=[[1]]), np.arange(1)).tolist() == []


# In an update: two rows of four and three tokens; the third has nothing to learn from.

BATCH = Batch.from_rows(
    prompts=[[3, 4, 5], [3], [3, 4]],
    responses=[[6], [7, 8], [9, 9]],
    response_mask=[[1], [1, 0], [0, 0]],
    advantages=[[1.0], [1.0, 1.0], [1.0, 1.0]],
)


def flops_of_update(engine: TrainEngine, **settings: Any) -> float:
    """Returns the FLOPs that an update counts."""
    counted = Mock(wraps=engine.flops_meter.utilisation)
    with patch.object(engine.flops_meter, "utilisation", counted):
        engine.update(BATCH, forward_of("policy"), loss_of("policy"), progress=silent, **settings)
    flops: float = counted.call_args.args[0]
    return flops


def test_the_flops_of_an_update_are_those_of_its_epochs_and_not_of_recomputation(tmp_path: Path) -> None:
    folder = save_policy(tmp_path)
    once = train_flops(DenseShape(BODY, 32 * len(VOCABULARY), WIDTH), lengths(4, 3), lengths(1, 2))
    assert flops_of_update(make_engine(folder, gradient_checkpointing=True)) == once
    assert flops_of_update(make_engine(folder, ppo_epochs=3)) == 3 * once


def test_an_update_that_ends_early_counts_what_it_has_computed(tmp_path: Path) -> None:
    once = train_flops(DenseShape(BODY, 32 * len(VOCABULARY), WIDTH), lengths(4, 3), lengths(1, 2))
    engine = make_engine(save_policy(tmp_path), ppo_epochs=3)
    assert flops_of_update(engine, stop_above=MetricLimit("nll", 0.0)) == once


def test_a_forward_pass_is_a_third_of_an_update_and_leaves_no_row_out(tmp_path: Path) -> None:
    every_row = train_flops(DenseShape(BODY, 32 * len(VOCABULARY), WIDTH), lengths(4, 3, 4), lengths(1, 2, 2))
    assert make_engine(save_policy(tmp_path)).flops_meter.forward_flops(BATCH) == every_row / 3


def test_ranks_that_share_rows_count_a_part_of_each(tmp_path: Path) -> None:
    engine = make_engine(save_policy(tmp_path))
    shared = engine.config.changed("", {"ulysses_sequence_parallel_size": 2})
    whole, meter = engine.flops_meter, FlopsMeter(engine.model, shared, engine.device)
    assert meter.forward_flops(BATCH) == whole.forward_flops(BATCH) / 2
    mini_batches = engine.plan_update(BATCH)
    assert meter.update_flops(BATCH, mini_batches) == whole.update_flops(BATCH, mini_batches) / 2


def test_an_update_reports_the_share_of_a_peak_that_is_known(tmp_path: Path) -> None:
    engine = make_engine(save_policy(tmp_path))
    assert "mfu" not in engine.update(BATCH, forward_of("policy"), loss_of("policy"), progress=silent).metrics
    engine.flops_meter.peak_flops = 1e15
    assert 0 < engine.update(BATCH, forward_of("policy"), loss_of("policy"), progress=silent).metrics["mfu"] < 1


def test_a_role_reports_it_under_the_name_that_dashboards_know() -> None:
    named = metrics_of_role("critic", {"mfu": 0.25, "lr": 0.5})
    assert named == {"perf/mfu/critic": 0.25, "critic/lr": 0.5}
    check_declared(named)
