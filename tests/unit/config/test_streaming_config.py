"""The number of parts of a step, if it is chosen automatically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitppo.config.resolve import resolve_run
from splitppo.machine.cores import PermittedCores
from tests.support.fake_services import make_config


def resolved(run_dir: Path, **changes: Any) -> object:
    config = make_config(run_dir, **{"rollout__stream_groups": "auto", "data__max_response_length": 64, **changes})
    return config.rollout.stream_groups


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


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_number_stays(tmp_path: Path, num_parts: int) -> None:
    assert resolved(tmp_path, rollout__stream_groups=num_parts) == num_parts


def test_a_resumed_run_keeps_the_number_that_it_has_been_using(tmp_path: Path) -> None:
    auto, stored, three = (make_config(tmp_path, rollout__stream_groups=number) for number in ("auto", 2, 3))
    cores = PermittedCores(frozenset({0}))
    assert resolve_run(auto, stored, cores).rollout == stored.rollout
    assert resolve_run(three, stored, cores).rollout == three.rollout
