"""The frozen reward model: the scores of transformers' forward pass, and models that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from services.actor.role import ActorRole
from services.critic.role import CriticRole
from services.reward.role import RewardRole
from services.runtime.role import CheckpointedRole, Role
from splitppo.batch import Batch
from splitppo.config.section import RoleName
from tests.support.models import POSITIONS, VOCABULARY, save_policy, save_reward_model, tiny_config
from tests.support.roles import context_of, reward_scores
from tests.support.seeds import shifted

ROLES: dict[RoleName, Any] = {"actor": ActorRole, "critic": CriticRole, "reward": RewardRole}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("models") / "reward", seed=3)


def build(
    policy: Path, model: Path | str, role: RoleName = "critic", host: RoleName = "critic", **section: Any
) -> Role:
    """A role of a run whose reward model is on the group of `host`."""
    sections = {"reward_model": {"model": str(model), **section}, "placement": {"reward_model": host}}
    built: Role = ROLES[role](context_of(role, actor={"model": str(policy)}, **sections))
    return built


def rows() -> list[list[int]]:
    """Returns rows of many lengths, also of one token and with padding tokens at the end."""
    rng = np.random.default_rng(shifted(0))
    drawn = [rng.integers(0, len(VOCABULARY), length).tolist() for length in (1, 2, 9, 30, 30, 31, 4)]
    return [*drawn, [5, 6, 0, 0]]


def scores_of(role: Role, tokens: list[list[int]]) -> list[float]:
    computed = reward_scores(role, Batch.from_rows(reward_tokens=tokens))
    assert list(computed.columns) == ["rm_scores"]
    assert computed["rm_scores"].lengths.tolist() == [1] * len(tokens)
    scores: list[float] = computed["rm_scores"].values.tolist()
    return scores


def by_transformers(model: Path, tokens: list[list[int]]) -> list[float]:
    """The head at the last token of each row, one row at a time."""
    whole = AutoModelForSequenceClassification.from_pretrained(model)
    whole.config.pad_token_id = None  # else it takes trailing padding tokens for padding
    with torch.no_grad():
        return [float(whole(input_ids=torch.tensor([row])).logits) for row in tokens]


@pytest.mark.promise("a reward model")
@pytest.mark.parametrize("use_remove_padding", [False, True])
@pytest.mark.parametrize("num_rows", [None, 3])
@pytest.mark.parametrize("host", ["critic", "reward"])
def test_scores_are_those_of_a_direct_forward_pass(
    policy: Path, reward_model: Path, host: RoleName, use_remove_padding: bool, num_rows: int | None
) -> None:
    batching = {"use_remove_padding": use_remove_padding, "ppo_micro_batch_size_per_gpu": num_rows}
    role = build(policy, reward_model, host, host, **batching)
    expected = by_transformers(reward_model, rows())
    np.testing.assert_allclose(scores_of(role, rows()), expected, atol=1e-5)
    assert np.ptp(expected) > 0.1


@pytest.mark.parametrize(("role", "host"), [("actor", "critic"), ("critic", "reward"), ("reward", "critic")])
def test_another_group_says_who_has_it(policy: Path, reward_model: Path, role: RoleName, host: RoleName) -> None:
    sentence = rf"the {role} group holds no reward model: placement\.reward_model is {host}, call"
    with pytest.raises(ValueError, match=sentence):
        scores_of(build(policy, reward_model, role, host), rows())


def test_a_reward_group_trains_nothing(policy: Path, reward_model: Path) -> None:
    role = build(policy, reward_model, "reward", "reward")
    assert not isinstance(role, CheckpointedRole)
    assert role.num_parameters == AutoModelForSequenceClassification.from_pretrained(reward_model).num_parameters()
    assert isinstance(build(policy, reward_model), CheckpointedRole)


@pytest.mark.parametrize("role", ROLES)
def test_without_a_model_no_group_has_one(policy: Path, role: RoleName) -> None:
    with pytest.raises(ValueError, match=f"the {role} group holds no reward model: reward_model.model is empty"):
        scores_of(build(policy, "", role), rows())


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ([[5], []], "column 'reward_tokens', row 1: expected at least one token, got none"),
        (
            [[5], [6, len(VOCABULARY)]],
            f"column 'reward_tokens', row 1: expected a token id in .*, got {len(VOCABULARY)}",
        ),
        ([[5] * (POSITIONS + 1)], f"row 0: expected at most {POSITIONS} tokens, got {POSITIONS + 1} tokens"),
    ],
)
def test_rows_that_do_not_fit_the_model_are_refused(
    policy: Path, reward_model: Path, tokens: list[list[int]], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        scores_of(build(policy, reward_model), tokens)


def test_a_row_may_be_as_long_as_the_model_has_positions(policy: Path, reward_model: Path) -> None:
    longest = [[7] * POSITIONS]
    np.testing.assert_allclose(
        scores_of(build(policy, reward_model), longest), by_transformers(reward_model, longest), atol=1e-5
    )


def test_a_classifier_of_several_labels_is_refused(policy: Path, tmp_path: Path) -> None:
    two = save_reward_model(tmp_path / "two", num_labels=2)
    with pytest.raises(
        ValueError, match=r"two is not a usable Hugging Face reward model: expected .* one label, it has 2"
    ):
        build(policy, two)


def test_a_model_whose_tokens_see_what_comes_later_is_refused(policy: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    encoder = BertForSequenceClassification(BertConfig(vocab_size=len(VOCABULARY), num_labels=1, **sizes))
    encoder.save_pretrained(tmp_path / "encoder")
    with pytest.raises(ValueError, match=r"expected a decoder with a linear head `score`, BertForSequence.* has none"):
        build(policy, tmp_path / "encoder")


def test_a_head_that_the_folder_lacks_is_not_made_up(policy: Path, tmp_path: Path) -> None:
    headless = save_policy(tmp_path / "headless")
    tiny_config(num_labels=1).save_pretrained(headless)
    with pytest.raises(ValueError, match=r"headless lacks weights of Qwen2ForSequenceClassification: score\.weight"):
        build(policy, headless)


def test_the_critic_keeps_its_weights_and_its_architecture(policy: Path, reward_model: Path) -> None:
    alone, hosting = build(policy, ""), build(policy, reward_model)
    scores_of(hosting, rows())
    assert hosting.compute_weights_digest() == alone.compute_weights_digest()
    assert (hosting.model, hosting.num_parameters) == (alone.model, alone.num_parameters)
