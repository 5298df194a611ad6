"""Privileged tokens in the slot of a group: the value model reads them, and nothing else that computes there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from services.critic.role import CriticRole
from services.reward.role import RewardRole
from services.roles.sharding import shard_by_tokens
from services.runtime.role import Role
from splitppo.batch import Batch, Column
from splitppo.v1 import batch_pb2, critic_pb2
from tests.support.engines import draw_new_head
from tests.support.episodes import make_episodes, with_privileged_tokens
from tests.support.models import POSITIONS, VOCABULARY, save_policy, save_reward_model
from tests.support.roles import (
    build_actor,
    build_rollout,
    call,
    context_of,
    ref_log_probs,
    reward_scores,
    teacher_columns,
)

EPISODES = with_privileged_tokens(make_episodes())
TOKENS = ("prompts", "responses", "segments", "privileged_tokens", "response_mask")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_policy(folder / "policy")
    save_policy(folder / "teacher", seed=7)
    save_reward_model(folder / "reward", seed=3)
    return folder


@pytest.fixture(scope="module")
def group(models: Path) -> CriticRole:
    """A critic with reference, teacher and reward model beside it; its value head is a random one."""
    role = CriticRole(
        context_of(
            "critic",
            actor={"model": str(models / "policy"), "use_kl_loss": True},
            critic={"lr": 1e-2, "ppo_mini_batch_size": 2},
            teacher={"model": str(models / "teacher"), "signal": "top_k", "top_k": 3},
            reward_model={"model": str(models / "reward")},
            placement={"reference": "critic", "teacher": "critic", "reward_model": "critic"},
        )
    )
    draw_new_head(role._engine)
    return role


def slot(**changes: list[list[int]]) -> Batch:
    """The rows of a slot that every model of the group finds its columns in."""
    batch = EPISODES.batch.select(TOKENS)
    reward_tokens = [[3, 4, *response] for response in batch["responses"].rows()]
    return batch.merge(Batch.from_rows(reward_tokens=reward_tokens, **changes))


def without(batch: Batch, name: str) -> Batch:
    return batch.select(other for other in batch.columns if other != name)


def values_of(role: Role, batch: Batch) -> np.ndarray:
    computed = call(role, "ComputeValues", critic_pb2.ComputeValuesRequest(), batch).columns
    assert computed is not None
    return computed["values"].values


def bits(computed: Batch) -> Mapping[str, bytes]:
    return {name: column.values.tobytes() for name, column in computed.columns.items()}


def update(role: Role, batch: Batch) -> None:
    """Trains towards returns of 1, from values of 0."""
    lengths = batch["responses"].lengths
    zeros = np.zeros(int(lengths.sum()), np.float32)
    targets = Batch(batch.num_rows, {"values": Column(zeros, lengths), "returns": Column(zeros + 1.0, lengths)})
    request = critic_pb2.CriticUpdateRequest(slot=batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1))
    call(role, "Update", request, batch.merge(targets))


def test_frozen_models_of_the_critics_group_compute_the_same_bits_with_and_without_them(group: CriticRole) -> None:
    with_them, without_them = slot(), without(slot(), "privileged_tokens")

    for compute in (ref_log_probs, teacher_columns, reward_scores):
        assert bits(compute(group, with_them)) == bits(compute(group, without_them))
    assert np.abs(values_of(group, with_them) - values_of(group, without_them)).max() > 0.01


def test_two_commands_alone_take_them_from_a_slot(group: CriticRole, models: Path, tmp_path: Path) -> None:
    reward_model = {"reward_model": {"model": str(models / "reward")}, "placement": {"reward_model": "reward"}}
    policy = {"actor": {"model": str(models / "policy")}}
    roles: Mapping[str, Role] = {
        "actor": build_actor(models / "policy", use_kl_loss=True),
        "critic": group,
        "reward": RewardRole(context_of("reward", **policy, **reward_model)),
        "rollout": build_rollout(models / "policy", tmp_path),
    }
    takers = {
        (name, command.method)
        for name, role in roles.items()
        for command in role.commands()
        if "privileged_tokens" in {*command.rows.columns, *command.rows.optional_columns}
    }

    assert takers == {("critic", "ComputeValues"), ("critic", "Update")}


def test_an_update_learns_with_them(models: Path) -> None:
    """The weights after it are others than without them, or with others."""
    actor = {"model": str(models / "policy")}
    role = CriticRole(context_of("critic", actor=actor, critic={"lr": 1e-2, "ppo_mini_batch_size": 2}))
    others = slot(privileged_tokens=[[5, 6, 7]] * EPISODES.batch.num_rows)
    digests = set()
    for batch in (slot(), without(slot(), "privileged_tokens"), others):
        role.load_checkpoint(None)
        update(role, batch)
        digests.add(role.compute_weights_digest())

    assert len(digests) == 3


def test_rows_that_the_value_model_cannot_read_are_refused(group: CriticRole) -> None:
    rows = {"prompts": [[5], [6]], "responses": [[7], [8]]}
    unknown = Batch.from_rows(**rows, privileged_tokens=[[3], [4, len(VOCABULARY)]])
    long = Batch.from_rows(**rows, privileged_tokens=[[3], [4] * (POSITIONS - 1)])
    later = Batch.from_rows(
        prompts=[[5], [6]], responses=[[7], [8] * 20], segments=[[], [10, 5]], privileged_tokens=[[3], [4] * 503]
    )

    for batch, sentence in (
        (unknown, r"^column 'privileged_tokens', row 1: expected a token id in \[0, \d+\), got \d+$"),
        (long, rf"^row 1 has {POSITIONS + 1} tokens of privileged_tokens \({POSITIONS - 1}\), prompt and response,"),
        (later, r"^row 1 has 514 tokens of privileged_tokens \(503\), one of its contexts and what follows,"),
    ):
        with pytest.raises(ValueError, match=sentence):
            values_of(group, batch)
        with pytest.raises(ValueError, match=sentence):
            update(group, batch)
    assert len(values_of(group, Batch.from_rows(**rows, privileged_tokens=[[3], [4] * (POSITIONS - 2)]))) == 2


def test_rows_are_dealt_by_what_the_value_model_reads() -> None:
    """A row of one token costs as much as a hundred if it has 99 privileged ones, before each of its contexts."""
    batch = Batch.from_rows(
        prompts=[[1]] * 4,
        responses=[[1]] * 3 + [[1, 2, 3]],
        segments=[[], [], [], [1, 1]],
        privileged_tokens=[[], [], [], [1] * 99],
    )

    assert [share.tolist() for share in shard_by_tokens(batch, 2)] == [[3], [0, 1, 2]]
