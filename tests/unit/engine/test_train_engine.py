"""The effects of an update on a model: steps, skips, schedules, metrics, progress."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from services.actor.losses.actor_loss import actor_loss
from services.engine.model.weights import Kind
from services.engine.token_metrics import LossOutput
from services.engine.train_engine import TrainEngine
from splitppo.batch import Batch, Column
from splitppo.config import ActorConfig
from tests.support.engines import (
    forward_of,
    gradients,
    loss_of,
    make_batch,
    make_engine,
    relative_error,
    silent,
    weights,
)
from tests.support.models import save_policy
from tests.support.seeds import shifted

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


def update(engine: TrainEngine, batch: Batch, loss=None, progress=silent) -> dict[str, float]:
    return engine.update(batch, forward_of(engine.kind), loss or loss_of(engine.kind), progress=progress).metrics


def poisoned(poisoned_calls: set[int]):
    """The usual loss, infinite in some calls."""
    calls = iter(range(1000))

    def loss(outputs, tokens):
        output = loss_of("policy")(outputs, tokens)
        return replace(output, loss=output.loss * torch.inf) if next(calls) in poisoned_calls else output

    return loss


def test_a_non_finite_gradient_skips_the_step_is_counted_and_said(policy: Path, caplog) -> None:
    engine = make_engine(policy)
    before = engine.compute_weights_digest()
    metrics = update(engine, make_batch(), poisoned({0}))
    assert engine.compute_weights_digest() == before
    assert metrics["num_skipped_steps"] == 1
    assert math.isnan(metrics["grad_norm"])
    assert "optimizer step skipped" in caplog.text


def test_other_mini_batches_are_applied_when_one_is_skipped(policy: Path) -> None:
    batch = make_batch(num_mini_batches=2)
    skipping, reference = make_engine(policy), make_engine(policy)
    metrics = update(skipping, batch, poisoned({0}))
    second = batch.take(np.flatnonzero(batch["mini_batches"].values == 1)).select(
        [name for name in batch.columns if name != "mini_batches"]
    )
    expected = update(reference, second)
    assert skipping.compute_weights_digest() == reference.compute_weights_digest()
    assert metrics["num_skipped_steps"] == 1
    assert metrics["loss"] == pytest.approx(expected["loss"])
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"])


def test_gradient_is_clipped_to_the_configured_norm(policy: Path) -> None:
    norms = {}

    class Recorder(torch.optim.SGD):
        def step(self, closure=None):
            norms["applied"] = torch.nn.utils.get_total_norm([p.grad for g in self.param_groups for p in g["params"]])

    engine = make_engine(policy, grad_clip=0.5)
    engine.optimizer = Recorder(engine.model.parameters(), lr=1.0)
    metrics = update(engine, make_batch())
    assert metrics["grad_norm"] > 0.5
    assert float(norms["applied"]) == pytest.approx(0.5, rel=1e-5)


def test_every_mini_batch_of_every_epoch_is_one_optimizer_step(policy: Path) -> None:
    engine = make_engine(policy, ppo_epochs=3)
    update(engine, make_batch(num_mini_batches=2, ppo_epochs=3))
    assert {int(state["step"]) for state in engine.optimizer.state.values()} == {6}


def test_learning_rate_advances_once_per_update_not_per_mini_batch(policy: Path) -> None:
    engine = make_engine(policy, lr=1.0, lr_warmup_steps=4, ppo_epochs=2)
    batch = make_batch(num_mini_batches=2, ppo_epochs=2)
    assert [update(engine, batch)["lr"] for _ in range(3)] == [0.25, 0.5, 0.75]


def test_metrics_are_means_over_mini_batches_of_sums_over_micro_batches(policy: Path) -> None:
    batch = make_batch(num_mini_batches=2)
    whole, many = make_engine(policy, lr=0.0), make_engine(policy, lr=0.0, ppo_micro_batch_size_per_gpu=1)
    assert update(whole, batch) == pytest.approx(update(many, batch), rel=1e-5)
    halves = [batch.take(np.flatnonzero(batch["mini_batches"].values == index)) for index in range(2)]
    halves = [half.select([name for name in half.columns if name != "mini_batches"]) for half in halves]
    mean = sum(update(whole, half)["entropy"] for half in halves) / 2
    assert update(whole, batch)["entropy"] == pytest.approx(mean, rel=1e-5)


def mean_ratio_of_rows(outputs, tokens):
    """A loss over sequences: the geometric mean of each row's probabilities."""
    sums_B = torch.zeros(int(tokens.row_index.max()) + 1)
    sums_B = sums_B.index_add(0, tokens.row_index, torch.where(tokens.mask, outputs["log_probs"], 0.0))
    counts_B = torch.zeros_like(sums_B).index_add(0, tokens.row_index, tokens.mask.float())
    ratio_B = (sums_B / counts_B.clamp(min=1.0)).exp()
    return LossOutput((tokens.weights * ratio_B[tokens.row_index]).sum(), {}, {})


@pytest.mark.parametrize("packed", [True, False])
def test_a_loss_over_sequences_sees_whole_rows_however_they_are_split(policy: Path, packed: bool) -> None:
    settings = {"lr": 0.0, "loss_agg_mode": "seq-mean-token-mean"}
    reference = make_engine(policy, **settings)
    many = make_engine(policy, **settings, use_remove_padding=packed, ppo_micro_batch_size_per_gpu=3)
    expected = update(reference, make_batch(), mean_ratio_of_rows)
    assert expected["grad_norm"] > 0
    assert update(many, make_batch(), mean_ratio_of_rows) == pytest.approx(expected, rel=1e-4)


def test_progress_counts_the_micro_batches_of_the_whole_update(policy: Path) -> None:
    engine = make_engine(policy, ppo_micro_batch_size_per_gpu=3, ppo_epochs=2)
    reports: list[tuple[int, int, str]] = []
    update(engine, make_batch(10, num_mini_batches=2, ppo_epochs=2), progress=lambda *report: reports.append(report))
    assert [done for done, _, _ in reports] == list(range(1, len(reports) + 1))
    assert {(total, phase) for _, total, phase in reports} == {(len(reports), "update")}


def test_gradient_checkpointing_changes_no_gradient(policy: Path) -> None:
    plain, recomputing = make_engine(policy), make_engine(policy, gradient_checkpointing=True)
    batch = make_batch()
    assert relative_error(gradients(recomputing, batch), gradients(plain, batch)) <= 1e-6


def test_selective_checkpointing_has_the_same_bits_and_computes_attention_once(policy: Path) -> None:
    batch, found, num_calls = make_batch(), [], []
    for checkpointing in (True, "selective"):
        engine = make_engine(policy, gradient_checkpointing=checkpointing)
        with torch.profiler.profile() as profile:
            found.append(gradients(engine, batch))
        calls = [one for one in profile.events() if one.name == "aten::_scaled_dot_product_flash_attention_for_cpu"]
        # Only the kernel itself makes an output; a call that finds what was kept does not.
        num_calls.append(sum(any(part.name == "aten::empty_like" for part in call.cpu_children) for call in calls))
    assert all(torch.equal(*pair) for pair in zip(*(named.values() for named in found), strict=True))
    assert num_calls[0] == 2 * num_calls[1] > 0


def without_tokens(batch: Batch, mini_batch: int | None = None) -> Batch:
    """The batch with no counting token, or with none in one of its mini-batches."""
    rows = batch["mini_batches"].values == mini_batch if mini_batch is not None else np.ones(batch.num_rows, np.bool_)
    masked = np.repeat(rows, batch["responses"].lengths)
    mask = Column(np.where(masked, 0, batch["response_mask"].values).astype(np.uint8), batch["responses"].lengths)
    return batch.merge(Batch(batch.num_rows, {"response_mask": mask}))


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_nothing_is_learned_from_mini_batches_without_any_token(policy: Path, kind: Kind, caplog) -> None:
    engine = make_engine(policy, kind, ppo_epochs=2, weight_decay=0.1)
    batch = make_batch(num_mini_batches=2, ppo_epochs=2)
    update(engine, batch)  # from here on AdamW has a momentum
    before = engine.compute_weights_digest()
    metrics = update(engine, without_tokens(batch))
    assert engine.compute_weights_digest() == before
    assert {int(state["step"]) for state in engine.optimizer.state.values()} == {4}
    assert (metrics["num_empty_steps"], metrics["num_skipped_steps"]) == (4, 0)
    assert not {"loss", "grad_norm"} & metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())
    assert "4 of 4 mini-batches hold no token to learn from" in caplog.text


def test_an_update_that_learns_nothing_counts_as_a_step_of_the_schedule(policy: Path) -> None:
    engine = make_engine(policy, lr=1.0, lr_warmup_steps=4)
    batch = make_batch()
    assert [update(engine, rows)["lr"] for rows in (batch, without_tokens(batch), batch)] == [0.25, 0.5, 0.75]
    assert engine.num_updates == 3


@pytest.mark.parametrize("packed", [True, False])
def test_a_mini_batch_without_any_token_leaves_the_others_alone(policy: Path, packed: bool) -> None:
    batch = make_batch(num_mini_batches=2)
    ones = Column(np.ones(len(batch["responses"].values), np.float32), batch["responses"].lengths)
    batch = batch.merge(Batch(batch.num_rows, {"rollout_is_weights": ones}))
    second = batch.take(np.flatnonzero(batch["mini_batches"].values == 1))
    second = second.select([name for name in batch.columns if name != "mini_batches"])
    config = ActorConfig.model_validate({"model": "unused"})
    loss = actor_loss(config)
    engine, reference = (make_engine(policy, use_remove_padding=packed) for _ in range(2))
    reports: list[tuple[int, int, str]] = []
    metrics = update(engine, without_tokens(batch, 0), loss, lambda *report: reports.append(report))
    expected = update(reference, second, loss)
    assert engine.compute_weights_digest() == reference.compute_weights_digest()
    assert metrics.pop("num_empty_steps") == 1
    assert expected.pop("num_empty_steps") == 0
    for name in metrics.keys() - {"tokens_rank_min", "tokens_rank_max", "tokens_rank_mean"}:
        assert metrics[name] == expected[name], name
    assert reports[-1][:2] == (len(reports), len(reports))


def test_computing_leaves_weights_and_gradients_alone(policy: Path) -> None:
    engine = make_engine(policy)
    before = engine.compute_weights_digest()
    engine.compute(make_batch(), forward_of("policy"), outputs=["log_probs"], progress=silent)
    assert engine.compute_weights_digest() == before
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_rows_without_a_response_keep_their_place(policy: Path) -> None:
    batch = make_batch(6)
    column = make_engine(policy).compute(batch, forward_of("policy"), outputs=["entropy"], progress=silent)["entropy"]
    assert column.lengths.tolist() == batch["responses"].lengths.tolist()
    assert column.lengths[1] == 0


@pytest.mark.parametrize("rows", [[], [1]])
def test_computing_nothing_gives_empty_columns(policy: Path, rows: list[int]) -> None:
    batch = make_batch(6).take(np.array(rows, np.int64))
    column = make_engine(policy).compute(batch, forward_of("policy"), outputs=["entropy"], progress=silent)["entropy"]
    assert column.num_rows == len(rows)
    assert column.values.dtype == np.float32
    assert len(column.values) == 0


def test_generation_with_left_padding_equals_generation_without(policy: Path) -> None:
    engine = make_engine(policy)
    prompt = torch.tensor([[9, 8, 7]])
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    with engine.gathered() as model, torch.no_grad():
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        padded = torch.tensor([[0, 0, 9, 8, 7], [5, 4, 3, 2, 6]])
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        together = model.generate(padded, attention_mask=mask, **settings)
    assert together[0, 2:].tolist() == alone[0].tolist()


def test_an_engine_trains_after_generation_as_if_it_had_not_generated(policy: Path) -> None:
    batch = make_batch()
    generating, other = make_engine(policy), make_engine(policy)
    with generating.gathered() as model, torch.no_grad():
        model.generate(torch.tensor([[9, 8]]), attention_mask=torch.ones(1, 2, dtype=torch.long), max_new_tokens=2)
    update(generating, batch)
    update(other, batch)
    assert generating.compute_weights_digest() == other.compute_weights_digest()


def test_untied_embeddings_train_too(tmp_path: Path) -> None:
    engine = make_engine(save_policy(tmp_path / "untied", tie_word_embeddings=False))
    before = weights(engine)
    update(engine, make_batch())
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= before.keys()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen3", "Gemma3Text", "GPT2"])
def test_packed_rows_of_other_architectures_equal_padded_ones(tmp_path: Path, architecture: str) -> None:
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 6}
    if architecture == "GPT2":
        sizes = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = getattr(transformers, f"{architecture}Config")(**sizes)
    torch.manual_seed(shifted(0))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    packed, padded = (make_engine(tmp_path, use_remove_padding=packing) for packing in (True, False))
    batch = make_batch(5)
    assert relative_error(gradients(packed, batch), gradients(padded, batch)) <= 1e-5


def test_a_model_that_loses_the_row_bounds_is_not_silently_packed(policy: Path) -> None:
    engine = make_engine(policy, use_remove_padding=True)
    original = engine.model.base_model.forward
    engine.model.base_model.forward = lambda input_ids, position_ids, use_cache, **lost: original(
        input_ids=input_ids, position_ids=position_ids, use_cache=use_cache
    )
    with pytest.raises(NotImplementedError, match="Qwen2ForCausalLM cannot pack rows"):
        engine.compute(make_batch(4), forward_of("policy"), outputs=["log_probs"], progress=silent)


def gemma2(folder: Path, **settings) -> Path:
    config = Gemma2Config(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        final_logit_softcapping=0.5,
        **settings,
    )
    torch.manual_seed(shifted(0))
    Gemma2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("attention_softcap", [None, 2.0])
def test_soft_capped_logits_and_sliding_windows_equal_the_models_own(tmp_path: Path, attention_softcap) -> None:
    engine = make_engine(gemma2(tmp_path, attn_logit_softcapping=attention_softcap))
    batch = make_batch(4)
    actual = engine.compute(batch, forward_of("policy"), outputs=["log_probs"], progress=silent)["log_probs"].rows()
    model = Gemma2ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for prompt, response, row in zip(batch["prompts"].rows(), batch["responses"].rows(), actual, strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        with torch.no_grad():
            log_softmax = torch.log_softmax(model(tokens[None]).logits[0].double() / 0.7, -1)[len(prompt) - 1 : -1]
        expected = log_softmax.gather(-1, tokens[len(prompt) :, None]).squeeze(-1).numpy()
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-5)


def test_packing_a_model_with_soft_capped_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use_remove_padding: rows of Gemma2ForCausalLM cannot be packed"):
        make_engine(gemma2(tmp_path, attn_logit_softcapping=2.0), use_remove_padding=True)
