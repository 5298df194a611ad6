"""Packed rows in padded groups: every token is there once, and padding is bounded."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.engine.batching.padded_rows import PaddedRows
from tests.support.engines import CPU


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
def test_every_token_has_one_place_in_the_group_of_its_row(lengths: list[int]) -> None:
    rows = PaddedRows.of(np.array(lengths, np.int64), CPU)
    padded = torch.cat([group.flatten() for group in rows.positions])
    assert padded[rows.places].tolist() == list(range(sum(lengths)))
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    for group in rows.positions:
        for positions in group.tolist():
            assert len({row_of[position] for position in positions}) == 1
            assert positions == sorted(positions)  # padding comes last


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_padding_at_most_doubles_the_tokens_in_few_groups(lengths: list[int]) -> None:
    rows = PaddedRows.of(np.array(lengths, np.int64), CPU)
    assert sum(group.numel() for group in rows.positions) <= 2 * sum(lengths)
    assert len(rows.positions) <= math.log2(max(lengths) / min(lengths)) + 1
