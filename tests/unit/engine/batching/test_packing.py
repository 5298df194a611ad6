"""Rows as the tensors of a micro-batch, also where there is nothing to learn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.engine.batching.packing import MicroBatchLimits, collate
from splitppo.batch import Batch


@pytest.mark.parametrize("packed", [True, False])
def test_responses_without_a_token_have_no_selected_ones(packed: bool) -> None:
    nothing: list[int] = []
    batch = Batch.from_rows(prompts=[[1, 2], [3]], responses=[nothing, nothing], selected_tokens=[nothing, nothing])
    tokens = collate(batch, None, MicroBatchLimits(packed, 1), device=torch.device("cpu"), epoch=1).tokens
    np.testing.assert_array_equal(tokens.selected.numpy(), np.zeros(0, np.bool_))


TAUGHT = Batch.from_rows(
    prompts=[[1, 2], [3]],
    responses=[[4, 5], [6]],
    teacher_top_ids=[[7, 8, 9, 10], [11, 12]],
    teacher_top_log_probs=[[-1, -2, -3, -4], [-5, -6]],
)


@pytest.mark.parametrize("packed", [True, False])
def test_columns_of_several_values_per_token_have_a_row_for_each_token(packed: bool) -> None:
    columns = collate(TAUGHT, None, MicroBatchLimits(packed, 1), device=torch.device("cpu")).tokens.columns
    assert columns["teacher_top_ids"].tolist() == [[7, 8], [9, 10], [11, 12]]
    assert columns["teacher_top_ids"].dtype == torch.int64  # by which torch gathers
    assert columns["teacher_top_log_probs"].tolist() == [[-1, -2], [-3, -4], [-5, -6]]


@pytest.mark.parametrize("packed", [True, False])
def test_a_micro_batch_without_rows_has_the_columns_of_all_others(packed: bool) -> None:
    """Its rank computes with the others, and its token counts nowhere."""
    tokens = collate(TAUGHT.take([]), None, MicroBatchLimits(packed, 1), device=torch.device("cpu")).tokens
    assert {name: tuple(column.shape) for name, column in tokens.columns.items()} == {
        "teacher_top_ids": (1, 1),
        "teacher_top_log_probs": (1, 1),
    }
    assert not tokens.mask.any()
