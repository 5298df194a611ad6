"""The worker digests change with the keys that shape a worker, and with no others."""

from pathlib import Path

import pytest

from splitppo.config.worker_digest import worker_digest
from tests.support.configs import load


@pytest.mark.parametrize(
    "override",
    [
        "run.total_steps=9",
        "run.schedule=overlap",
        "run.dir=elsewhere",
        "services.actor.address=a:1",
        "services.critic.threads=2",
        "checkpoint.save_freq=1",
        "evaluation.test_freq=1",
    ],
)
def test_a_longer_run_or_another_address_needs_no_restart(tmp_path: Path, override: str) -> None:
    before, after = load(tmp_path), load(tmp_path, override)

    assert worker_digest(before, "actor") == worker_digest(after, "actor")
    assert worker_digest(before, "critic") == worker_digest(after, "critic")


@pytest.mark.parametrize(
    ("override", "actor_changes", "critic_changes"),
    [
        ("actor.lr=1", True, False),
        ("critic.lr=1", False, True),
        ("critic.model=other", False, True),
        ("rollout.temperature=0.5", True, False),
        ("rollout.n=2", True, True),
        ("run.seed=2", True, True),
        ("actor.use_kl_loss=true", True, False),
        ("algorithm.use_kl_in_reward=true", True, False),
    ],
)
def test_what_shapes_a_worker_changes_its_digest_and_no_others(
    tmp_path: Path, override: str, actor_changes: bool, critic_changes: bool
) -> None:
    before, after = (load(tmp_path, "placement.reference=actor", *overrides) for overrides in ((), (override,)))

    assert (worker_digest(before, "actor") != worker_digest(after, "actor")) is actor_changes
    assert (worker_digest(before, "critic") != worker_digest(after, "critic")) is critic_changes


@pytest.mark.parametrize(
    ("override", "actor_changes", "critic_changes"),
    [
        ("placement.reference=actor", True, True),
        ("actor.model=other", True, True),
        ("rollout.temperature=0.5", True, True),
        ("rollout.top_k=5", True, False),
        ("critic.lr=1", False, True),
        ("algorithm.use_kl_in_reward=true", False, False),
    ],
)
def test_the_reference_shapes_the_group_that_hosts_it(
    tmp_path: Path, override: str, actor_changes: bool, critic_changes: bool
) -> None:
    hosted = ("actor.use_kl_loss=true", "placement.reference=critic", "critic.model=value")
    before, after = load(tmp_path, *hosted), load(tmp_path, *hosted, override)

    assert (worker_digest(before, "actor") != worker_digest(after, "actor")) is actor_changes
    assert (worker_digest(before, "critic") != worker_digest(after, "critic")) is critic_changes


@pytest.mark.parametrize(
    ("override", "critic_changes"),
    [
        ("reward_model.model=other", True),
        ("reward_model.dtype=bf16", True),
        ("reward_model.coef=0.5", False),
        ("reward_model.max_length=64", False),
        ("reward_model.tokenizer=other", False),
    ],
)
def test_the_reward_model_shapes_the_group_that_hosts_it(tmp_path: Path, override: str, critic_changes: bool) -> None:
    before = load(tmp_path, "reward_model.model=rm")
    after = load(tmp_path, "reward_model.model=rm", override)

    assert worker_digest(before, "actor") == worker_digest(after, "actor") == worker_digest(load(tmp_path), "actor")
    assert (worker_digest(before, "critic") != worker_digest(after, "critic")) is critic_changes
    assert worker_digest(before, "critic") != worker_digest(load(tmp_path), "critic")


def test_a_reward_group_is_shaped_by_its_model_alone(tmp_path: Path) -> None:
    hosted = ("reward_model.model=rm", "placement.reward_model=reward")
    before = load(tmp_path, *hosted)
    other_run = load(tmp_path, *hosted, "actor.model=other", "run.seed=7", "rollout.n=3", "reward_model.coef=0.5")
    other_model = load(tmp_path, *hosted, "reward_model.model=other")

    assert worker_digest(before, "reward") == worker_digest(other_run, "reward")
    assert worker_digest(before, "reward") != worker_digest(other_model, "reward")
    assert [worker_digest(before, role) for role in ("actor", "critic")] == [
        worker_digest(load(tmp_path), role) for role in ("actor", "critic")
    ]


@pytest.mark.parametrize(
    ("override", "changes"),
    [("actor.model=other", True), ("rollout.top_k=5", True), ("run.seed=2", True), ("critic.lr=1", False)],
)
def test_a_rollout_group_is_shaped_by_the_policy_and_its_sampling(tmp_path: Path, override: str, changes: bool) -> None:
    before, after = (load(tmp_path, "services.rollout.num_processes=1", *more) for more in ((), (override,)))

    assert (worker_digest(before, "rollout") != worker_digest(after, "rollout")) is changes
    assert worker_digest(before, "actor") == worker_digest(load(tmp_path), "actor")


def test_a_place_for_no_reference_changes_no_digest(tmp_path: Path) -> None:
    before, after = load(tmp_path), load(tmp_path, "placement.reference=critic")

    assert [worker_digest(before, role) for role in before.roles] == [
        worker_digest(after, role) for role in after.roles
    ]


def test_credentials_change_no_digest(tmp_path: Path) -> None:
    digests = [worker_digest(load(tmp_path, *change), "actor") for change in ([], ["services.security.token_env=T"])]
    assert digests[0] == digests[1]
