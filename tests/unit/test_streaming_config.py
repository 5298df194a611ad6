"""The number of parts of a step, where it is chosen automatically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.streamed_parts import part_ends
from splitppo.config.streaming import keep_stream_groups, part_shares, part_work_shares, resolve_stream_groups
from tests.fake_services import make_config


def resolved(run_dir: Path, **changes: Any) -> object:
    config = make_config(run_dir, **{"rollout__stream_groups": "auto", "data__max_response_length": 64, **changes})
    return resolve_stream_groups(config).rollout.stream_groups


@pytest.mark.parametrize("schedule", ["serial", "gather", "overlap"])
def test_with_a_critic_there_are_six_parts_under_every_schedule(tmp_path: Path, schedule: str) -> None:
    assert resolved(tmp_path, run__schedule=schedule, rollout__n=4) == 6


def test_a_step_of_few_responses_has_no_more_parts_than_those(tmp_path: Path) -> None:
    assert resolved(tmp_path, rollout__n=1) == 2


def test_where_no_other_group_computes_nothing_is_streamed(tmp_path: Path) -> None:
    assert resolved(tmp_path, algorithm__adv_estimator="grpo") == 1


def test_short_responses_are_not_streamed(tmp_path: Path) -> None:
    assert resolved(tmp_path, data__max_response_length=63) == 1


def test_a_reward_model_in_a_group_of_its_own_is_another_group(tmp_path: Path) -> None:
    changes = {"reward_model__model": "rm", "placement__reward_model": "reward", "algorithm__adv_estimator": "grpo"}
    assert resolved(tmp_path, **changes, rollout__n=4) == 6


@given(st.integers(1, 12))
def test_shares_are_what_a_rank_cuts_its_responses_into(num_parts: int) -> None:
    shares, num_responses = part_shares(num_parts), 1 << 20
    ends = part_ends(num_responses, num_parts)
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    assert sizes == pytest.approx([share * num_responses for share in shares], abs=num_parts)
    assert sum(shares) == pytest.approx(1.0)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_number_stays(tmp_path: Path, num_parts: int) -> None:
    assert resolved(tmp_path, rollout__stream_groups=num_parts) == num_parts


def test_a_resumed_run_keeps_the_number_that_it_has_been_using(tmp_path: Path) -> None:
    auto, stored, three = (make_config(tmp_path, rollout__stream_groups=number) for number in ("auto", 2, 3))
    assert keep_stream_groups(auto, stored).rollout == stored.rollout
    assert keep_stream_groups(three, stored).rollout == three.rollout


@pytest.mark.parametrize(
    ("response_share", "shares"),
    [(0.0, [0.5, 0.25, 0.25]), (1.0, [0.25, 0.3125, 0.4375]), (0.5, [0.375, 0.28125, 0.34375])],
)
def test_tokens_of_the_parts_by_hand(response_share: float, shares: list[float]) -> None:
    assert part_work_shares(3, response_share) == shares


def test_tokens_of_the_parts_are_those_of_evenly_spread_lengths() -> None:
    prompt, longest, num_responses = 64, 128, 10_000
    lengths = np.linspace(0, longest, num_responses) + prompt
    ends = part_ends(num_responses, 6)
    tokens = [lengths[begin:end].sum() / lengths.sum() for begin, end in zip([0, *ends], ends, strict=False)]
    assert part_work_shares(6, (longest / 2) / (prompt + longest / 2)) == pytest.approx(tokens, rel=1e-3)
