"""Model FLOPs by hand and as PyTorch counts them, and the devices for which a share of the peak is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from services.engine.flops import DenseShape, FlopsMeter, dense_shape, forward_flops, peak_flops, train_flops
from services.engine.token_metrics import MetricLimit, metrics_of_role
from services.engine.train_engine import TrainEngine
from splitppo.batch import Batch
from splitppo.run_folder.metrics import check_declared
from tests.support.engines import forward_of, load_model, loss_of, make_engine, silent
from tests.support.models import VOCABULARY, save_experts, save_policy, tiny_config

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
