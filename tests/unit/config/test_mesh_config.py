"""The keys of a group's mesh and strategy: what does not fit is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.configs import load, mistake

RANKS = ("services.actor.num_processes=8", "services.critic.num_processes=2")
WITHOUT_CRITIC = "algorithm.adv_estimator=grpo"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["actor.fsdp_size=3"],
            "actor.fsdp_size (3) must divide services.actor.num_processes (8): expected one"
            " of 1, 2, 4, 8, or -1 for all ranks",
        ),
        (["actor.fsdp_size=0"], "actor.fsdp_size (0) must divide services.actor.num_processes (8)"),
        (["actor.fsdp_size=16"], "actor.fsdp_size (16) must divide services.actor.num_processes (8)"),
        (["critic.fsdp_size=4"], "critic.fsdp_size (4) must divide services.critic.num_processes (2)"),
        (["actor.fsdp_size=-2"], "key 'actor.fsdp_size': input should be greater than or equal to -1, got -2"),
        (
            ["actor.strategy=ddp", "actor.fsdp_size=2"],
            "actor.fsdp_size (2) divides weights, and actor.strategy ddp holds all of them on every rank: leave"
            " actor.fsdp_size out, or set actor.strategy to fsdp2",
        ),
        (
            ["actor.fsdp_size=2", "actor.ulysses_sequence_parallel_size=4"],
            "actor.ulysses_sequence_parallel_size (4) must divide actor.fsdp_size (2)",
        ),
        (
            ["critic.strategy=ddp", "critic.ulysses_sequence_parallel_size=3"],
            "critic.ulysses_sequence_parallel_size (3) must divide services.critic.num_processes (2)",
        ),
        (
            ["actor.strategy=fsdp"],
            "key 'actor.strategy': input should be 'fsdp2' or 'ddp', got 'fsdp' (did you mean fsdp2?)",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    assert sentence in mistake(tmp_path, *RANKS, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.fsdp_size=-1"],
        ["actor.fsdp_size=1"],
        ["actor.fsdp_size=4", "critic.fsdp_size=2"],
        ["actor.strategy=ddp", "critic.strategy=ddp"],
        ["actor.fsdp_size=4", "actor.ulysses_sequence_parallel_size=2", "critic.ulysses_sequence_parallel_size=2"],
        ["actor.strategy=ddp", "actor.ulysses_sequence_parallel_size=8"],
        [WITHOUT_CRITIC, "rollout.n=2", "critic.fsdp_size=4"],
    ],
)
def test_what_fits_is_accepted(tmp_path: Path, overrides: list[str]) -> None:
    load(tmp_path, *RANKS, *overrides)
