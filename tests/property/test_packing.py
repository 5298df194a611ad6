"""Micro-batches: every split has every row once, collating loses nothing, and no split changes the gradient."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.batching.packing import MicroBatchLimits, collate, plan_micro_batches, row_lengths
from services.engine.train_engine import TrainEngine
from splitppo.batch import Batch
from tests.support.engines import CPU, gradients, make_batch, make_engine, relative_error
from tests.support.models import save_policy

LENGTHS = st.lists(st.integers(1, 60), max_size=40).map(lambda lengths: np.array(lengths, np.int32))
LIMITS = st.builds(
    MicroBatchLimits,
    packed=st.booleans(),
    max_tokens=st.integers(1, 200),
    max_rows=st.none() | st.integers(1, 10),
    rope_switch=st.none() | st.integers(1, 60),
    pads_attention=st.booleans(),
)


@given(LENGTHS, LIMITS, st.integers(1, 12))
def test_a_plan_holds_every_row_once_in_at_least_as_many_micro_batches_as_asked(lengths, limits, at_least) -> None:
    parts = plan_micro_batches(lengths, limits, at_least=at_least)
    assert len(parts) >= at_least
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    if len(lengths) >= len(parts):
        assert all(len(part) for part in parts)


@given(LENGTHS, LIMITS, st.integers(1, 12))
def test_a_plan_holds_no_more_micro_batches_than_asked_where_the_rows_need_fewer(lengths, limits, at_least) -> None:
    needed = len(plan_micro_batches(lengths, limits))
    assert len(plan_micro_batches(lengths, limits, at_least=at_least)) == max(needed, at_least)


@given(LENGTHS, LIMITS, st.integers(1, 12))
def test_no_micro_batch_has_rows_on_both_sides_of_a_switch_of_rotary_factors(lengths, limits, at_least) -> None:
    if limits.rope_switch is not None:
        for part in plan_micro_batches(lengths, limits, at_least=at_least):
            assert len(np.unique(lengths[part] > limits.rope_switch)) <= 1


def test_a_rank_makes_no_more_micro_batches_than_the_others_where_balance_by_cost_breaks_the_budget() -> None:
    # 9 parts are within the budget, 10 parts of equal cost are not.
    rows = [5, 83, 200, 257, 349, 412, 416, 423, 439, 638, 743, 765, 947, 993, 995, 1018, 1050, 1152, 1390]
    lengths, limits = np.array(rows, np.int32), MicroBatchLimits(packed=True, max_tokens=1419)
    assert len(plan_micro_batches(lengths, limits)) == 9
    parts = plan_micro_batches(lengths, limits, at_least=10)
    assert len(parts) == 10
    assert all(len(part) and lengths[part].sum() <= 1419 for part in parts)


@given(LENGTHS, LIMITS, st.integers(1, 12))
def test_no_micro_batch_is_over_its_limit_unless_it_is_one_row(lengths, limits, at_least) -> None:
    for part in plan_micro_batches(lengths, limits, at_least=at_least):
        if limits.max_rows is not None:
            assert len(part) <= limits.max_rows
        elif len(part) > 1:
            tokens = lengths[part].sum() if limits.packed else lengths[part].max() * len(part)
            assert tokens <= limits.max_tokens


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    tokens = st.integers(1, 99)
    prompts = draw(st.lists(st.lists(tokens, min_size=1, max_size=9), min_size=1, max_size=7))
    responses = [draw(st.lists(tokens, max_size=9)) for _ in prompts]
    masks = [draw(st.lists(st.integers(0, 1), min_size=len(row), max_size=len(row))) for row in responses]
    values = [np.arange(len(row)) + 100 * index for index, row in enumerate(responses)]
    return Batch.from_rows(prompts=prompts, responses=responses, response_mask=masks, values=values)


@given(batches(), st.booleans())
def test_collating_and_taking_apart_again_is_the_identity(batch: Batch, packed: bool) -> None:
    micro = collate(batch, None, MicroBatchLimits(packed, 1), device=CPU)
    lengths = row_lengths(batch)
    if packed:
        assert micro.cu_seq_lens is not None
        starts = micro.cu_seq_lens.numpy()[:-1]
        assert micro.cu_seq_lens.diff().tolist() == lengths.tolist()
    else:
        starts = np.arange(batch.num_rows) * micro.input_ids.shape[1]
    flat, positions = micro.input_ids.flatten().numpy(), micro.position_ids.flatten().numpy()
    for start, prompt, response in zip(starts, batch["prompts"].rows(), batch["responses"].rows(), strict=True):
        row = slice(start, start + len(prompt) + len(response))
        assert flat[row].tolist() == [*prompt, *response]
        assert positions[row].tolist() == list(range(len(prompt) + len(response)))
    assert torch.equal(micro.input_ids.flatten()[micro.previous + 1], micro.targets)
    assert micro.targets.tolist() == batch["responses"].values.tolist()
    assert micro.tokens.columns["values"].tolist() == batch["values"].values.tolist()
    lengths = [length for length in batch["responses"].lengths.tolist() if length]
    assert micro.tokens.row_index.tolist() == np.repeat(range(len(lengths)), lengths).tolist()
    assert micro.tokens.mask.tolist() == (batch["response_mask"].values != 0).tolist()
    assert micro.tokens.weights.tolist() == micro.tokens.mask.float().tolist()


def test_no_rows_collate_to_one_masked_token_of_weight_zero() -> None:
    batch = make_batch(4).take(np.empty(0, np.int64))
    for packed in (True, False):
        micro = collate(batch, None, MicroBatchLimits(packed, 1), device=CPU)
        assert micro.tokens.mask.tolist() == [False]
        assert micro.tokens.weights.tolist() == [0.0]
        assert micro.tokens.columns.keys() == {"advantages", "returns"}


@cache
def engine_of(kind) -> TrainEngine:
    return make_engine(save_policy(Path(mkdtemp()) / "policy"), kind, loss_agg_mode="seq-mean-token-mean")


@cache
def gradients_row_by_row(kind, seed: int) -> dict[str, torch.Tensor]:
    engine = engine_of(kind)
    engine.limits = MicroBatchLimits(packed=False, max_tokens=1)
    return gradients(engine, make_batch(9, seed=seed))


@pytest.mark.parametrize("kind", ["policy", "value"])
@settings(max_examples=20)
@given(limits=LIMITS, seed=st.integers(0, 2))
def test_gradient_does_not_depend_on_micro_batches_padding_or_packing(kind, limits, seed) -> None:
    engine = engine_of(kind)
    engine.limits = limits
    actual = gradients(engine, make_batch(9, seed=seed))
    assert relative_error(actual, gradients_row_by_row(kind, seed)) <= 1e-5
