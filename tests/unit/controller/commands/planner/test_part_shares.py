"""The parts of a streamed generation, as shares of the responses and of the tokens of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.commands.planner.part_shares import part_shares
from splitppo.balance import part_ends


@given(st.integers(1, 12))
def test_shares_are_what_a_rank_cuts_its_responses_into(num_parts: int) -> None:
    shares, num_responses = part_shares(num_parts), 10_007
    ends = part_ends(num_responses, num_parts)
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    assert sizes == pytest.approx([share * num_responses for share in shares], abs=num_parts)
    assert sum(shares) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("response_share", "shares"),
    [(0.0, [0.5, 0.25, 0.25]), (1.0, [0.25, 0.3125, 0.4375]), (0.5, [0.375, 0.28125, 0.34375])],
)
def test_tokens_of_the_parts_by_hand(response_share: float, shares: list[float]) -> None:
    assert part_shares(3, response_share) == shares


def test_tokens_of_the_parts_are_those_of_evenly_spread_lengths() -> None:
    prompt, longest, num_responses = 64, 128, 10_000
    lengths = np.linspace(0, longest, num_responses) + prompt
    ends = part_ends(num_responses, 6)
    tokens = [lengths[begin:end].sum() / lengths.sum() for begin, end in zip([0, *ends], ends, strict=False)]
    assert part_shares(6, (longest / 2) / (prompt + longest / 2)) == pytest.approx(tokens, rel=1e-3)
