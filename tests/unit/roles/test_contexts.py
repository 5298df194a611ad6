"""Rows with several contexts in the commands of roles: what they refuse, and what a user's loss sees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.critic.role import CriticRole
from services.roles.sharding import shard_by_tokens
from services.runtime.role import Role
from splitppo.batch import Batch, Column
from splitppo.v1 import actor_pb2, critic_pb2
from tests.support.engines import draw_new_head
from tests.support.episodes import make_episodes
from tests.support.models import POSITIONS, save_policy
from tests.support.roles import build_actor, call, context_of, ref_log_probs, update_request


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def actor(model: Path) -> Role:
    return build_actor(model)


def rows(segments: list[int], num_tokens: int = 10, **columns: Any) -> Batch:
    """Two rows, the second one with these values of the column `segments`."""
    return Batch.from_rows(
        prompts=[[5, 6], [7]], responses=[[8, 9], [10] * num_tokens], segments=[[], segments], **columns
    )


@pytest.mark.parametrize(
    ("segments", "num_tokens", "sentence"),
    [
        ([7, 2, 4, 2], 10, r"row 1: expected contexts that begin in ascending order in a response of 10 tokens"),
        ([12, 1], 10, r"row 1: expected contexts that begin in ascending order in a response of 10 tokens"),
        ([4, 0], 10, r"row 1: expected a context of 1 to 6 tokens"),
        ([4, 7], 10, r"row 1: expected a context of 1 to 6 tokens"),
        ([4], 10, r"row 1: expected two values for each later segment, got 1"),
        (
            [3, 2],
            POSITIONS + 4,
            rf"^row 1 has {POSITIONS + 1} tokens of one of its contexts and what follows",
        ),
    ],
)
def test_every_command_refuses_segments_that_no_model_can_compute(
    actor: Role, segments: list[int], num_tokens: int, sentence: str
) -> None:
    batch = rows(segments, num_tokens)
    with pytest.raises(ValueError, match=sentence):
        call(actor, "ComputeLogProbs", actor_pb2.ComputeLogProbsRequest(), batch)
    with pytest.raises(ValueError, match=sentence):
        call(actor, "Update", update_request(), batch.merge(advantages_of(batch)))


def advantages_of(batch: Batch) -> Batch:
    lengths = batch["responses"].lengths
    return Batch(batch.num_rows, {"advantages": Column(np.ones(int(lengths.sum()), np.float32), lengths)})


def test_an_episode_may_have_more_tokens_than_the_model_has_positions(actor: Role) -> None:
    batch = rows([400, 2, 600, 5], 900)
    computed = call(actor, "ComputeLogProbs", actor_pb2.ComputeLogProbsRequest(), batch).columns

    assert computed is not None
    assert computed["old_log_probs"].lengths.tolist() == [2, 900]
    of_contexts = computed["old_log_probs"].rows()[1][[400, 401, 600, 601, 602, 603, 604]]
    assert of_contexts.tolist() == [0.0] * 7


@pytest.mark.parametrize("mask", [None, [1] * 10, [1] * 5 + [0] * 5])
def test_an_update_refuses_to_learn_from_tokens_of_a_context(actor: Role, mask: list[int] | None) -> None:
    batch = rows([4, 3])
    batch = batch.merge(advantages_of(batch))
    if mask is not None:
        batch = batch.merge(Batch.from_rows(response_mask=[[1, 1], mask]))
    num_counted = 3 if mask is None else sum(mask[4:7])
    sentence = (
        r"^column 'response_mask', row 1: expected 0 for the 3 tokens of the context that begins at 4,"
        rf" got {num_counted} that count$"
    )
    with pytest.raises(ValueError, match=sentence):
        call(actor, "Update", update_request(), batch)


def test_reference_and_value_model_compute_segments(model: Path) -> None:
    """The reference is the policy before its first update; a value is that of the segment alone."""
    batch = make_episodes().batch.select(["prompts", "responses", "segments"])
    role = build_actor(model, use_kl_loss=True)
    computed = call(role, "ComputeLogProbs", actor_pb2.ComputeLogProbsRequest(), batch).columns
    assert computed is not None
    of_reference = ref_log_probs(role, batch)["ref_log_probs"].values
    assert of_reference == pytest.approx(computed["old_log_probs"].values, abs=1e-6)

    critic = CriticRole(context_of("critic", critic={"model": str(model)}, actor={"model": str(model)}))
    draw_new_head(critic._engine)
    values = call(critic, "ComputeValues", critic_pb2.ComputeValuesRequest(), batch).columns
    assert values is not None
    assert ((values["values"].values == 0.0) == (computed["old_log_probs"].values == 0.0)).all()


SEES_ROWS = """
import torch


def mine(tokens, config):
    num_tokens = tokens.row_sum(torch.ones_like(tokens.log_probs))
    if not torch.equal(num_tokens[tokens.mask], tokens.advantages[tokens.mask]):
        raise ValueError("a row is not whole")
    return -tokens.log_ratio.exp()
"""


@pytest.mark.parametrize("packed", [True, False])
def test_a_users_loss_sees_whole_rows(model: Path, tmp_path: Path, packed: bool) -> None:
    (tmp_path / "mine.py").write_text(SEES_ROWS)
    settings = {"custom_path": str(tmp_path / "mine.py"), "loss_mode": "mine"}
    role = build_actor(model, policy_loss=settings, use_remove_padding=packed, ppo_max_token_len_per_gpu=24)
    batch = make_episodes((1, 3, 2, 1, 3, 5)).batch
    counted = np.repeat(batch["response_mask"].sums(), batch["responses"].lengths).astype(np.float32)
    lengths = batch["responses"].lengths
    batch = batch.merge(Batch(batch.num_rows, {"advantages": Column(counted, lengths)}))

    assert "actor/pg_loss" in call(role, "Update", update_request(), batch).metrics


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}


def test_a_loss_of_whole_rows_refuses_segments_that_cannot_share_a_micro_batch(tmp_path: Path) -> None:
    """Longrope rotates rows of over 16 tokens by other factors, and a micro-batch has one kind of factors."""
    folder = save_policy(tmp_path, rope_parameters=LONGROPE)
    batch = rows([4, 3], num_tokens=30)
    mask = [[1, 1], [1] * 4 + [0] * 3 + [1] * 23]
    batch = batch.merge(advantages_of(batch)).merge(Batch.from_rows(response_mask=mask))
    batch = batch.take(np.array([0, 0, 0, 0, 0, 1]))

    with pytest.raises(ValueError, match=r"^row 5 has segments of up to 16 tokens and longer ones, .* loss_mode gspo"):
        update(build_actor(folder, policy_loss={"loss_mode": "gspo"}), batch)
    assert "actor/pg_loss" in update(build_actor(folder), batch)


def update(role: Role, batch: Batch) -> Mapping[str, Any]:
    return call(role, "Update", update_request(), batch).metrics


def test_rows_are_dealt_by_the_cost_of_their_segments() -> None:
    """Attention over ten segments of 4k tokens costs a tenth of that over one of 40k."""
    tokens = [1] * 40_000
    batch = Batch.from_rows(
        prompts=[[1]] * 4,
        responses=[tokens] * 4,
        segments=[[], *[[value for start in range(4000, 40_000, 4000) for value in (start, 1)]] * 3],
    )

    assert [share.tolist() for share in shard_by_tokens(batch, 2)] == [[0], [1, 2, 3]]
