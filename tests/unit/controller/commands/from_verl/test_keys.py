"""The table of verl's keys: it names only keys and metrics that exist."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from pydantic import BaseModel

from controller.commands.from_verl.keys import ROWS, VERL_DEFAULTS, row_of
from controller.commands.from_verl.row import Row
from splitppo.config import Config
from splitppo.run_folder.metrics import check_declared
from tools.from_verl_page import METRICS

NAMED = sorted({row.to for row in ROWS if row.to and "*" not in row.to})


def spelled_out(names: str) -> list[str]:
    """`a/{b,c}` is a/b and a/c."""
    parts = [part[1:-1].split(",") if part[:1] == "{" else [part] for part in re.split(r"(\{[^}]*\})", names)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


@pytest.mark.parametrize("key", NAMED)
def test_every_key_of_ours_is_one(key: str) -> None:
    section: Any = Config
    for part in key.split("."):
        assert issubclass(section, BaseModel), key
        assert part in section.model_fields, key
        section = section.model_fields[part].annotation


def test_no_row_stands_behind_one_that_says_it_already() -> None:
    plain = [row for row in ROWS if not row.is_pattern]
    hidden = [row.key for row in plain if row_of(row.key) is not row]
    assert hidden == []


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("actor_rollout_ref.actor.profiler.tool_config.nsys.discrete", "not needed"),
        ("actor_rollout_ref.rollout.profiler._target_", "not needed"),
        ("critic.fsdp.wrap_policy.min_num_params", "not needed"),
        ("critic.optim.lr", "taken"),
        ("trainer.critic_warmup", "changed"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.some_option", "not supported"),
        ("actor_rollout_ref.rollout.engine_kwargs.sglang.some_option", "not supported"),
        ("actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend", "not needed"),
    ],
)
def test_a_pattern_has_the_keys_that_it_means(key: str, expected: str) -> None:
    row = row_of(key)
    assert row is not None
    assert row.outcome == expected


@pytest.mark.parametrize("key", ["data.train_file", "trainer", "actor_rollout_ref.actor.lr", "algorithm.gamma.x"])
def test_what_verl_does_not_have_is_not_known(key: str) -> None:
    assert row_of(key) is None


def test_verl_defaults_ask_for_nothing_that_is_not_supported() -> None:
    def is_asked_for(row: Row) -> bool:
        return row.outcome == "not supported" and row.key in VERL_DEFAULTS and not row.is_off(VERL_DEFAULTS[row.key])

    assert [row.key for row in ROWS if is_asked_for(row)] == []


@pytest.mark.parametrize(
    "names", [theirs for theirs, ours in METRICS if ours.startswith("the same") and "*" not in theirs]
)
def test_metrics_of_the_same_name_are_ours(names: str) -> None:
    check_declared(spelled_out(names))
