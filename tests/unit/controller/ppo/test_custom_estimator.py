"""Estimators from a user's file: they get the whole batch, and their errors are named as the user's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from controller.ppo.advantages.registry import estimator_of
from controller.ppo.experience import assemble_experience
from splitppo.batch import Batch
from splitppo.config import AlgorithmConfig, ConfigError
from tests.support.scores import make_scores

FILE = """
import numpy as np

def centred(rewards_BT, mask_BT, groups_B, gamma):
    scores_B = rewards_BT.sum(axis=1)
    advantages_BT = np.broadcast_to((scores_B - scores_B.mean())[:, None], mask_BT.shape)
    return advantages_BT + 1000 * ~mask_BT, advantages_BT * gamma

def by_turn(rewards_BT, mask_BT, turns_BT, turn_gamma):
    assert turns_BT.dtype.kind == "i"
    return turns_BT, turns_BT * turn_gamma

def short(rewards_BT, mask_BT):
    return rewards_BT[:, :1], rewards_BT

def divides(rewards_BT, mask_BT):
    return np.full(mask_BT.shape, np.nan), rewards_BT

def raises(rewards_BT):
    raise RuntimeError("two\\nlines")

def forgets(rewards_BT):
    pass
"""


def algorithm(tmp_path: Path, name: str, text: str = FILE) -> AlgorithmConfig:
    file = tmp_path / "mine.py"
    file.write_text(text)
    return AlgorithmConfig(custom_path=file, adv_estimator=name, gamma=0.5)


def assembled(config: AlgorithmConfig, longest: int = 3) -> Batch:
    responses = [[5], np.arange(longest), [], [5, 6]]
    rollouts = Batch.from_rows(prompts=[[1], [1], [2], [2]], responses=responses)
    scores_B = np.array([0.0, 1.0, 8.0, 2.0], np.float32)
    return assemble_experience(config, rollouts, make_scores(scores_B), num_samples=2).batch


@pytest.mark.parametrize("longest", [3, 300_000])
def test_it_sees_the_whole_batch_at_once_and_is_cut_to_the_mask(tmp_path: Path, longest: int) -> None:
    batch = assembled(algorithm(tmp_path, "centred"), longest)
    # Scores 0, 1, 0 (an empty response has no token for its 8) and 2: their mean is 0.75.
    assert batch["advantages"].values.tolist() == [-0.75, *[0.25] * longest, 1.25, 1.25]
    assert batch["returns"].values.tolist() == [-0.375, *[0.125] * longest, 0.625, 0.625]


def test_it_may_know_the_turn_of_each_token(tmp_path: Path) -> None:
    config = algorithm(tmp_path, "by_turn").model_copy(update={"turn_gamma": 0.5})
    mask = [[1, 1, 0, 1], [0, 1, 1], [], [1, 0, 1, 0, 0, 1]]
    rollouts = Batch.from_rows(prompts=[[1]] * 4, responses=[[5] * len(row) for row in mask], response_mask=mask)
    batch = assemble_experience(config, rollouts, make_scores(np.zeros(4, np.float32)), num_samples=2).batch
    turns = [[1, 1, 0, 2], [0, 1, 1], [], [1, 0, 2, 0, 0, 3]]
    assert [row.tolist() for row in batch["advantages"].rows()] == turns
    assert batch["returns"].values.tolist() == [turn / 2 for row in turns for turn in row]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("short", "ValueError: expected advantages and returns of shape (4, 3), got (4, 1)"),
        ("divides", "ValueError: expected finite advantages and returns, got others"),
        ("raises", "RuntimeError: two lines"),
        ("forgets", "TypeError: "),
    ],
)
def test_what_goes_wrong_in_it_is_one_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assembled(algorithm(tmp_path, name))
    said = str(caught.value)
    assert said.startswith(f"key 'algorithm.custom_path': {name} of {tmp_path / 'mine.py'} failed: {sentence}")
    assert "\n" not in said


def test_a_file_that_cannot_be_imported_is_one_sentence(tmp_path: Path) -> None:
    broken = algorithm(tmp_path, "mine", "import nowhere_at_all\n\ndef mine(rewards_BT): ...\n")
    with pytest.raises(ConfigError, match=r"key 'algorithm.custom_path': importing .*mine.py failed: ModuleNotFound"):
        estimator_of(broken)
