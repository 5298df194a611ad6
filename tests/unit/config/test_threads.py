"""Compute threads per rank: the value of `auto`, the cores, and a sentence about more threads than cores."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from splitppo.config import Config, ServiceConfig
from splitppo.config.resolve import resolve_run
from splitppo.config.threads import crowding, crowding_of_group, threads_of_rank
from splitppo.machine.cores import PermittedCores
from tests.support.fake_services import make_config


def cores(number: int, quota: str | None = None) -> PermittedCores:
    return PermittedCores(frozenset(range(number)), None if quota is None else Fraction(quota))


def config_of(actor: dict[str, Any], critic: dict[str, Any] | None = None, **services: Any) -> Config:
    """A run with these groups; without a critic it is one of GRPO."""
    estimator = "grpo" if critic is None else "gae"
    groups = {"actor": actor, "critic": critic or {}}
    return make_config(Path("run"), services={**groups, **services}, algorithm__adv_estimator=estimator)


def threads(config: Config) -> tuple[int | str, int | str]:
    return config.services.actor.threads, config.services.critic.threads


ONE, TWO, SIX = {"num_processes": 1}, {"num_processes": 2}, {"num_processes": 6}
GPU, TWO_GPUS = {"num_processes": 1, "devices": [1]}, {"num_processes": 2, "devices": [0, 1]}


# What auto is.


@pytest.mark.parametrize(
    ("actor", "critic", "permitted", "expected"),
    [
        pytest.param(ONE, ONE, cores(2), (1, 1), id="two groups share two cores"),
        pytest.param(ONE, ONE, cores(16), (8, 8), id="and sixteen"),
        pytest.param(TWO, ONE, cores(2), (1, 1), id="at least one"),
        pytest.param(TWO, ONE, cores(16), (5, 5), id="whole threads, none too many"),
        pytest.param(SIX, TWO, cores(64), (8, 8), id="by rank, not by group"),
        pytest.param(ONE, None, cores(6), (6, "auto"), id="there is no critic"),
        pytest.param(ONE, ONE, cores(16, "4"), (2, 2), id="a quota"),
        pytest.param(ONE, ONE, cores(16, "5.9"), (2, 2), id="a quota that is no whole number"),
        pytest.param(ONE, ONE, cores(2, "1/2"), (1, 1), id="less than a core"),
        pytest.param(ONE, ONE, cores(2, "64"), (1, 1), id="a quota of more than there is"),
        pytest.param({"cpus": [0, 1, 2]}, {"cpus": [3]}, cores(16), (3, 1), id="each group has its own cores"),
        pytest.param({"cpus": [0, 1]}, {"cpus": [0, 1]}, cores(16), (1, 1), id="both groups have the same cores"),
        pytest.param({"cpus": [0, 1]}, ONE, cores(8), (1, 7), id="one group may use those of the other"),
        pytest.param({**TWO, "cpus": [4, 5, 6, 7]}, ONE, cores(4), (2, 4), id="cores of two ranks"),
        pytest.param(TWO_GPUS, ONE, cores(64), (8, 21), id="at most eight beside a GPU"),
        pytest.param(TWO_GPUS, GPU, cores(12), (4, 4), id="fewer if there are fewer"),
        pytest.param({"threads": 3}, ONE, cores(16), (3, 8), id="a number is what it is"),
    ],
)
def test_auto_divides_the_permitted_cores_between_the_ranks_of_both_groups(
    actor: dict[str, Any], critic: dict[str, Any] | None, permitted: PermittedCores, expected: tuple[int | str, ...]
) -> None:
    services = {"allow_shared_devices": True}
    resolved = resolve_run(config_of(actor, critic, **services), None, permitted)
    assert threads(resolved) == expected
    assert resolve_run(resolved, None, cores(99)) == resolved


@pytest.mark.parametrize(
    ("service", "num_ranks", "expected"),
    [({}, 1, 8), ({}, 3, 2), ({"cpus": [8, 9]}, 1, 2), ({"devices": [0]}, 1, 8), ({"threads": 5}, 4, 5), ({}, 9, 1)],
)
def test_a_group_that_others_start_divides_its_own_cores_between_its_own_ranks(
    service: dict[str, Any], num_ranks: int, expected: int
) -> None:
    assert threads_of_rank(ServiceConfig.model_validate(service), num_ranks, cores(8)) == expected


def test_groups_that_others_start_are_not_resolved_by_the_controller() -> None:
    config = config_of(ONE, ONE, launch="external")
    assert resolve_run(config, None, cores(8)) == config


# What a resumed run keeps.


def test_a_resumed_run_keeps_its_numbers_unless_the_user_names_one() -> None:
    stored = resolve_run(config_of(ONE, ONE), None, cores(8))
    assert threads(resolve_run(config_of(ONE, ONE), stored, cores(2))) == (4, 4)
    assert threads(resolve_run(config_of({"threads": 2}, ONE), stored, cores(2))) == (2, 4)


@pytest.mark.parametrize("changed", [TWO, {"devices": [0]}, {"cpus": [0]}])
def test_another_placement_keeps_nothing(changed: dict[str, Any]) -> None:
    stored = resolve_run(config_of(ONE, ONE), None, cores(64))
    config = config_of(changed, ONE)
    assert threads(resolve_run(config, stored, cores(8))) == threads(resolve_run(config, None, cores(8))) != (32, 32)
    assert threads(resolve_run(config_of(ONE, ONE, launch="external"), stored, cores(8))) == ("auto", "auto")


# More threads than cores.


@pytest.mark.parametrize(
    ("actor", "critic", "permitted", "sentence"),
    [
        (
            {"threads": 2},
            {"threads": 2},
            cores(2),
            "1 x services.actor.threads (2) + 1 x services.critic.threads (2) = 4 threads compute on 2 permitted cores"
            " and wait for each other, which can take several times as long: set services.actor.threads to 1 and"
            " services.critic.threads to 1",
        ),
        (
            {**TWO, "threads": 3},
            {"threads": 1},
            cores(8, "6"),
            "2 x services.actor.threads (3) + 1 x services.critic.threads (1) = 7 threads compute on 6 permitted cores"
            " and wait for each other, which can take several times as long: set services.actor.threads to 2",
        ),
        (
            {"threads": 1},
            {"cpus": [0], "threads": 2},
            cores(8),
            "1 x services.critic.threads (2) = 2 threads compute on 1 permitted cores and wait for each other, which"
            " can take several times as long: set services.critic.threads to 1",
        ),
        (
            {**TWO, "threads": 1},
            {"threads": 1},
            cores(2),
            "2 x services.actor.threads (1) + 1 x services.critic.threads (1) = 3 threads compute on 2 permitted cores"
            " and wait for each other: lower services.*.num_processes, or permit more cores",
        ),
        (
            {"threads": 1},
            {"threads": 1},
            cores(1),
            "1 x services.actor.threads (1) + 1 x services.critic.threads (1) = 2 threads compute on 1 permitted cores"
            " and wait for each other: permit more cores",
        ),
    ],
)
def test_more_threads_than_cores_are_named_with_what_to_set(
    actor: dict[str, Any], critic: dict[str, Any], permitted: PermittedCores, sentence: str
) -> None:
    assert crowding(config_of(actor, critic), permitted) == sentence


@pytest.mark.parametrize("permitted", [cores(2), cores(3), cores(8), cores(8, "2.5")])
def test_auto_never_crowds_cores_that_are_enough_for_all_ranks(permitted: PermittedCores) -> None:
    assert crowding(resolve_run(config_of(ONE, ONE), None, permitted), permitted) is None


def test_a_group_that_others_start_counts_its_own_ranks() -> None:
    service = ServiceConfig.model_validate({"threads": 4})
    assert crowding_of_group("actor", service, 2, cores(8)) is None
    assert str(crowding_of_group("actor", service, 2, cores(6))).startswith(
        "2 x services.actor.threads (4) = 8 threads compute on 6 permitted cores"
    )
    assert crowding(config_of({"threads": 99}, ONE, launch="external"), cores(1)) is None
