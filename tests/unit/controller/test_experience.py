"""From scores to rewards, advantages and returns, on rows worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.experience import Experience, assemble_experience
from splitppo.batch import Batch
from tests.fake_services import make_config

# Four responses to two prompts: of 3, 1, 0 and 2 tokens.
RESPONSES = [[5, 6, 7], [5], [], [5, 6]]
SCORES = np.array([1.0, 2.0, 3.0, 4.0], np.float32)


def assemble(tmp_path: Path, columns: dict[str, Any], *, num_samples: int = 2, **changes: Any) -> Experience:
    rollouts = Batch.from_rows(prompts=[[1], [1], [2, 3], [2, 3]], responses=RESPONSES, **columns)
    algorithm = make_config(tmp_path, **changes).algorithm
    return assemble_experience(algorithm, rollouts, SCORES, num_samples=num_samples, kl_coef=0.5)


def like_responses(number: float) -> list[list[float]]:
    return [[number] * len(row) for row in RESPONSES]


def test_the_score_sits_on_the_last_token_of_its_response(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {}, algorithm__adv_estimator="grpo")
    assert experience.rewards.tolist() == [[0, 0, 1], [2, 0, 0], [0, 0, 0], [0, 4, 0]]


def test_an_empty_response_is_counted_and_gets_no_reward_anywhere(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {"values": like_responses(0.0)})
    assert experience.num_empty == 1
    assert not experience.rewards[2].any()
    assert not experience.mask[2].any()
    assert len(experience.batch["advantages"].rows()[2]) == 0


def test_holes_in_the_response_mask_get_no_reward_and_no_advantage(tmp_path: Path) -> None:
    mask = [[1, 0, 0], [1], [], [0, 1]]
    experience = assemble(tmp_path, {"response_mask": mask}, algorithm__adv_estimator="reinforce_plus_plus")
    assert experience.rewards.tolist() == [[1, 0, 0], [2, 0, 0], [0, 0, 0], [0, 4, 0]]
    advantages = experience.padded("advantages")
    assert np.count_nonzero(advantages[~experience.mask]) == 0
    assert [len(row) for row in experience.batch["advantages"].rows()] == [3, 1, 0, 2]


def test_the_kl_is_subtracted_from_every_tokens_reward(tmp_path: Path) -> None:
    columns = {
        "old_log_probs": like_responses(-1.0),
        "ref_log_probs": like_responses(-1.25),
        "values": like_responses(0.0),
    }
    experience = assemble(tmp_path, columns, algorithm__use_kl_in_reward=True)
    # k1 is 0.25 nats on every token, times a coefficient of 0.5.
    assert experience.rewards.tolist() == [[-0.125, -0.125, 0.875], [1.875, 0, 0], [0, 0, 0], [-0.125, 3.875, 0]]
    assert experience.kl == pytest.approx(0.25 * 3 / 4, abs=1e-6)  # the empty row counts as 0
    assert experience.kl_coef == 0.5


def test_without_kl_in_the_reward_there_is_no_kl(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {"ref_log_probs": like_responses(-9.0)}, algorithm__adv_estimator="grpo")
    assert experience.kl is None
    assert experience.rewards.sum() == 7.0


def test_returns_with_gamma_and_lambda_one_are_the_rewards_to_go(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {"values": like_responses(0.5)})
    returns = [row.tolist() for row in experience.batch["returns"].rows()]
    assert returns == [[1, 1, 1], [2], [], [4, 4]]


def test_gae_advantages_are_whitened_over_all_tokens_and_returns_are_not(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {"values": like_responses(0.5)}, algorithm__lam=0.9)
    advantages = experience.batch["advantages"].values
    assert advantages.mean() == pytest.approx(0.0, abs=1e-6)
    assert advantages.std(ddof=1) == pytest.approx(1.0, abs=1e-6)
    assert experience.batch["returns"].values.mean() > 1.0


def test_neighbouring_rows_are_the_samples_of_one_prompt(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {}, algorithm__adv_estimator="grpo", algorithm__norm_adv_by_std_in_grpo=False)
    # Rows 0 and 1 have scores 1 and 2; rows 2 and 3 have 0 (no token to put it on) and 4.
    assert [row.tolist() for row in experience.batch["advantages"].rows()] == [[-0.5] * 3, [0.5], [], [2.0] * 2]


def test_columns_of_the_rollouts_stay_beside_what_was_learned(tmp_path: Path) -> None:
    experience = assemble(tmp_path, {"values": like_responses(0.5)})
    assert set(experience.batch.columns) == {"prompts", "responses", "values", "advantages", "returns"}
    assert all(
        column.values.dtype == np.float32 for name, column in experience.batch.columns.items() if "p" not in name
    )
    assert experience.num_tokens == 6 + 6
    assert experience.padded("values").shape == experience.mask.shape == (4, 3)
