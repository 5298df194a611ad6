"""A group of two ranks on gloo computes the same as one process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.engine.frozen_model import FrozenModel
from services.engine.token_metrics import MetricLimit
from services.engine.train_engine import TrainEngine
from services.engine.weights_digest import weights_digest
from splitppo.config.subsections.policy_loss import LOSS_MODES
from tests.integration.engine import worker
from tests.support.engines import (
    CPU,
    forward_of,
    gradients,
    keep_tokens_of,
    loss_of,
    make_batch,
    make_engine,
    relative_error,
    silent,
    weights,
    with_old_log_probs,
    with_policy_loss,
)
from tests.support.models import save_policy
from tests.support.ranks import RunRanks
from tests.support.roles import teacher_columns

KINDS = ("policy", "value")
OUTPUTS = {"policy": ["log_probs", "entropy"], "value": ["values"]}
BATCH = make_batch(11, num_mini_batches=2, ppo_epochs=2)


@dataclass(frozen=True)
class Group:
    """The results of two ranks: facts and tensors by rank, and their checkpoints."""

    models: Path
    output: Path
    facts: list[dict[str, Any]]
    tensors: list[dict[str, Any]]

    def engine(self, kind: str) -> TrainEngine:
        """The same engine in this process."""
        return make_engine(self.models / "policy", kind, ppo_max_token_len_per_gpu=64, ppo_epochs=2)


@pytest.fixture(scope="module")
def group(run: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Group:
    models, output = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("output")
    save_policy(models / "policy")
    save_policy(models / "second", seed=8, hidden_size=16, num_hidden_layers=1)
    run(2, worker.main, models, output)
    facts = [json.loads((output / f"facts_{rank}.json").read_text()) for rank in range(2)]
    tensors = [torch.load(output / f"tensors_{rank}.pt", weights_only=False) for rank in range(2)]
    return Group(models, output, facts, tensors)


def in_order(group: Group, key: str) -> list[np.ndarray]:
    """Rows that the ranks computed, in the order of the batch."""
    rows = {}
    for facts, tensors in zip(group.facts, group.tensors, strict=True):
        rows.update(zip(facts["rows"], tensors[key], strict=True))
    return [rows[row] for row in sorted(rows)]


def test_both_ranks_hold_between_40_and_60_percent_of_the_tokens(group: Group) -> None:
    metrics = group.facts[0]["policy/metrics"]
    total = 2 * metrics["tokens_rank_mean"]
    assert total == len(BATCH["prompts"].values) + len(BATCH["responses"].values)
    assert 0.4 <= metrics["tokens_rank_min"] / total <= metrics["tokens_rank_max"] / total <= 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights_new_head_included_do_not_depend_on_the_number_of_ranks(group: Group, kind: str) -> None:
    alone = group.engine(kind).compute_weights_digest()
    assert [facts[f"{kind}/initial_digest"] for facts in group.facts] == [alone, alone]


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_agree_with_one_rank(group: Group, kind: str) -> None:
    expected = group.engine(kind).compute(BATCH, forward_of(kind), outputs=OUTPUTS[kind], progress=silent)
    for name in OUTPUTS[kind]:
        for rank in range(2):
            group.tensors[rank][name] = group.tensors[rank][f"{kind}/compute/{rank}"][name]
        actual = np.concatenate(in_order(group, name))
        np.testing.assert_allclose(actual, expected[name].values, rtol=1e-4, atol=1e-5)


def test_sharded_reference_agrees_with_one_rank(group: Group) -> None:
    reference = FrozenModel(group.engine("policy").config, device=CPU)
    expected = reference.compute(BATCH, forward_of("policy"), outputs=["log_probs"], progress=silent)["log_probs"]
    for rank in range(2):
        group.tensors[rank]["reference"] = group.tensors[rank][f"reference/{rank}"]
    np.testing.assert_allclose(np.concatenate(in_order(group, "reference")), expected.values, rtol=1e-4, atol=1e-5)


def test_each_row_goes_through_its_own_teacher_also_where_a_rank_has_no_row_of_one(group: Group) -> None:
    alone = teacher_columns(worker.teachers(group.models), worker.with_teachers(BATCH))
    assert list(alone.columns) == ["teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs"]
    for rank, tensors in enumerate(group.tensors):
        for parts, found in zip(worker.DIVISIONS, tensors["taught"], strict=True):
            for name, column in alone.columns.items():
                for row, values in zip(parts[rank], found[name], strict=True):
                    assert values.dtype == column.values.dtype
                    np.testing.assert_allclose(values, column.rows()[row], rtol=1e-4, atol=1e-5)


def test_a_model_too_large_to_stay_gathered_trains_like_a_small_one(group: Group) -> None:
    expected = gradients(group.engine("policy"), BATCH)
    for facts, tensors in zip(group.facts, group.tensors, strict=True):
        assert relative_error(tensors["large/gradients"], expected) <= 1e-5
        assert relative_error(tensors["large/weights"], group.tensors[0]["policy/saved_weights"]) <= 1e-3
        assert facts["large/generated"] == group.facts[0]["large/generated"]


def test_bf16_computes_near_fp32_on_fp32_master_weights(group: Group) -> None:
    engine = group.engine("policy")
    assert group.facts[0]["bf16/initial_digest"] == engine.compute_weights_digest()
    expected = gradients(engine, BATCH)
    actual = group.tensors[0]["bf16/gradients"]
    assert {tensor.dtype for tensor in actual.values()} == {torch.float32}
    assert 1e-6 < relative_error(actual, expected) <= 0.1


def test_bf16_weights_are_kept_in_bf16_with_a_file_of_each_rank(group: Group) -> None:
    kept = AutoModelForCausalLM.from_pretrained(group.output / "bf16")
    assert kept.dtype == torch.bfloat16
    rounded = AutoModelForCausalLM.from_pretrained(group.models / "policy", dtype=torch.bfloat16)
    assert weights_digest(kept) == weights_digest(rounded)
    assert len([*(group.output / "bf16").glob("*.safetensors")]) == 2


def test_bf16_policy_and_reference_agree_before_the_first_update(group: Group) -> None:
    for rank in range(2):
        group.tensors[rank]["bf16"] = group.tensors[rank][f"bf16/{rank}"]
        group.tensors[rank]["bf16_reference"] = group.tensors[rank][f"bf16_reference/{rank}"]
    policy, reference = (np.concatenate(in_order(group, key)) for key in ("bf16", "bf16_reference"))
    assert policy.dtype == np.float32
    np.testing.assert_allclose(policy, reference, atol=1e-5)


@pytest.mark.promise("ranks divide the weights")
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_agrees_with_one_rank(group: Group, kind: str) -> None:
    expected = gradients(group.engine(kind), BATCH)
    assert relative_error(group.tensors[0][f"{kind}/gradients"], expected) <= 1e-5


@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_gradient_of_every_policy_loss_agrees_with_one_rank(group: Group, loss_mode: str) -> None:
    prepared, loss = with_policy_loss(with_old_log_probs(BATCH), loss_mode, ppo_epochs=2)
    expected = gradients(group.engine("policy"), prepared, loss)
    for tensors in group.tensors:
        assert relative_error(tensors[f"gradients_by/{loss_mode}"], expected) <= 1e-5


def test_ranks_end_an_update_before_the_same_mini_batch(group: Group) -> None:
    engine = make_engine(group.models / "policy", ppo_max_token_len_per_gpu=64, ppo_epochs=2, lr=0.0, weight_decay=0.0)
    forward, loss = forward_of("policy"), loss_of("policy")
    limit = MetricLimit("nll", engine.update(BATCH, forward, loss, progress=silent).metrics["nll"])
    expected = engine.update(BATCH, forward, loss, progress=silent, stop_above=limit).metrics["num_stopped_steps"]
    assert expected in (3, 4)  # of two mini-batches, one is over the mean of both
    assert [facts["stopped"]["num_stopped_steps"] for facts in group.facts] == [expected, expected]


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_agrees_when_one_rank_has_no_row_of_the_mini_batch(group: Group, kind: str) -> None:
    row = BATCH.take(np.array(group.facts[0]["rows"][:1]))
    expected = gradients(group.engine(kind), row)
    for tensors in group.tensors:
        assert relative_error(tensors[f"{kind}/gradients_of_one_row"], expected) <= 1e-5


@pytest.mark.promise("ranks divide the weights")
@pytest.mark.parametrize("kind", KINDS)
def test_update_and_its_metrics_agree_with_one_rank(group: Group, kind: str) -> None:
    engine = group.engine(kind)
    metrics = engine.update(BATCH, forward_of(kind), loss_of(kind), progress=silent).metrics
    assert group.facts[0][f"{kind}/metrics"] == group.facts[1][f"{kind}/metrics"]
    for name, value in group.facts[0][f"{kind}/metrics"].items():
        if not name.startswith("tokens_rank"):
            assert value == pytest.approx(metrics[name], rel=1e-4), name
    assert relative_error(group.tensors[0][f"{kind}/saved_weights"], weights(engine)) <= 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_agree_which_mini_batches_hold_no_token_and_make_no_step_for_them(group: Group, kind: str) -> None:
    engine = group.engine(kind)
    kept = keep_tokens_of(BATCH, group.facts[0]["rows"][0])
    expected = engine.update(kept, forward_of(kind), loss_of(kind), progress=silent).metrics
    assert expected["num_empty_steps"] == 2  # of two mini-batches in each of two epochs; the others are rank 0's alone
    for facts, tensors in zip(group.facts, group.tensors, strict=True):
        metrics = facts[f"{kind}/sparse_metrics"]
        assert metrics["num_empty_steps"] == 2
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert facts[f"{kind}/sparse_digest"] == group.facts[0][f"{kind}/sparse_digest"]
        assert relative_error(tensors[f"{kind}/sparse_weights"], weights(engine)) <= 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_digest_is_the_same_on_every_rank_and_of_the_values_alone(group: Group, kind: str) -> None:
    engine = group.engine(kind)
    engine.load_checkpoint(group.output / kind)
    assert {facts[f"{kind}/saved_digest"] for facts in group.facts} == {engine.compute_weights_digest()}


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_of_two_ranks_loads_bit_identically_on_one(group: Group, kind: str) -> None:
    engine = group.engine(kind)
    assert engine.load_checkpoint(group.output / kind) == f"state of {kind}".encode()
    assert engine.num_updates == 1
    for name, tensor in weights(engine).items():
        assert torch.equal(tensor, group.tensors[0][f"{kind}/saved_weights"][name]), name
    saved_moments = group.tensors[0][f"{kind}/saved_optimizer"]
    assert len(saved_moments) == 3 * len(weights(engine))
    for name, parameter in engine.model.named_parameters():
        for moment, tensor in engine.optimizer.state[parameter].items():
            assert torch.equal(tensor, saved_moments[f"{name}.{moment}"]), (name, moment)


@pytest.mark.parametrize("kind", KINDS)
def test_one_update_after_resuming_two_ranks_on_one_agrees(group: Group, kind: str) -> None:
    engine = group.engine(kind)
    engine.load_checkpoint(group.output / kind)
    engine.update(BATCH, forward_of(kind), loss_of(kind), progress=silent)
    for name, tensor in weights(engine).items():
        error = (tensor - group.tensors[0][f"{kind}/next_weights"][name]).abs().max()
        assert error <= 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_save_is_not_touched_by_an_update_that_runs_meanwhile(group: Group, kind: str) -> None:
    facts = group.facts[0]
    assert facts[f"{kind}/next_digest"] != facts[f"{kind}/saved_digest"]
    assert facts[f"{kind}/reloaded_digest"] == facts[f"{kind}/saved_digest"]


@pytest.mark.parametrize("kind", KINDS)
def test_replaying_an_update_after_a_reload_gives_the_same_weights_bit_for_bit(group: Group, kind: str) -> None:
    for facts in group.facts:
        assert facts[f"{kind}/replayed_digest"] == group.facts[0][f"{kind}/next_digest"]


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights_can_be_loaded_again(group: Group, kind: str) -> None:
    for facts in group.facts:
        assert facts[f"{kind}/reloaded_initial_digest"] == facts[f"{kind}/initial_digest"]


def test_ranks_generate_different_numbers_of_tokens_without_waiting_for_each_other(group: Group) -> None:
    assert group.facts[0]["generated"] == group.facts[1]["generated"]
    for facts in group.facts:
        assert facts["digest_after_generation"] == facts["policy/replayed_digest"]
