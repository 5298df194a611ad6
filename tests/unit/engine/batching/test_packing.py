"""Rows as the tensors of a micro-batch, where there is nothing to learn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.engine.batching.packing import collate
from splitppo.batch import Batch


@pytest.mark.parametrize("packed", [True, False])
def test_responses_without_a_token_have_no_selected_ones(packed: bool) -> None:
    nothing: list[int] = []
    batch = Batch.from_rows(prompts=[[1, 2], [3]], responses=[nothing, nothing], selected_tokens=[nothing, nothing])
    tokens = collate(batch, None, packed=packed, device=torch.device("cpu"), epoch=1).tokens
    np.testing.assert_array_equal(tokens.selected.numpy(), np.zeros(0, np.bool_))
