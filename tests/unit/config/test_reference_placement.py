"""The group that `placement.reference: auto` chooses, and that a resumed run keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.run.folder import RunFolder
from splitppo.config import Config, load_config
from splitppo.config.resolve import resolve_run
from splitppo.machine.cores import PermittedCores
from splitppo.run_folder.step_file import StepFile
from tests.support.fake_services import make_config

CORES = PermittedCores(frozenset({0}))
STREAMED = {"rollout__stream_groups": 8, "data__max_prompt_length": 64, "data__max_response_length": 512}


def config_with(tmp_path: Path, **changes: Any) -> Config:
    return make_config(tmp_path / "run", algorithm__use_kl_in_reward=True, **changes)


@pytest.mark.parametrize(
    ("changes", "host"),
    [
        ({}, "actor"),  # generate, then old + ref or values + ref: the same
        ({"services__critic__num_processes": 2}, "critic"),  # which computes it in half the time
        ({"services__actor__num_processes": 2}, "actor"),
        (STREAMED, "critic"),  # most of it hides behind generation
        ({**STREAMED, "critic__ppo_epochs": 4}, "actor"),  # the critic comes late
        ({**STREAMED, "reward_model__model": "rm"}, "critic"),
        ({"reward_model__model": "rm"}, "actor"),
        ({**STREAMED, "actor__lora_rank": 8}, "actor"),  # without a model of its own
    ],
)
def test_the_reference_goes_where_it_delays_the_step_least(tmp_path: Path, changes: dict[str, Any], host: str) -> None:
    assert config_with(tmp_path, **changes).reference_host == host


@pytest.mark.parametrize("schedule", ["serial", "gather", "overlap"])
def test_the_schedule_has_no_say(tmp_path: Path, schedule: str) -> None:
    assert config_with(tmp_path, **STREAMED, run__schedule=schedule).reference_host == "critic"


def test_without_a_critic_it_is_the_actors(tmp_path: Path) -> None:
    assert config_with(tmp_path, **STREAMED, algorithm__adv_estimator="grpo").reference_host == "actor"


def test_what_is_given_is_not_changed(tmp_path: Path) -> None:
    assert config_with(tmp_path, **STREAMED, placement__reference="actor").reference_host == "actor"


def test_a_resumed_run_keeps_its_place_unless_another_is_given(tmp_path: Path) -> None:
    stored, resumed = config_with(tmp_path, **STREAMED), config_with(tmp_path)
    assert (stored.reference_host, resumed.reference_host) == ("critic", "actor")
    assert resolve_run(resumed, stored, CORES).reference_host == "critic"
    given = config_with(tmp_path, placement__reference="actor")
    assert resolve_run(given, stored, CORES).reference_host == "actor"


def test_the_run_folder_resolves_it_once(tmp_path: Path) -> None:
    wide = {"services__critic__num_processes": 2}
    with RunFolder(config_with(tmp_path, **wide)) as first:
        StepFile(first.path / "metrics.jsonl").write(1, {})
    with RunFolder(config_with(tmp_path)) as second:
        assert second.config.reference_host == "critic"
        assert load_config(second.config_file).reference_host == "critic"
