"""The numbers of responses agree with a slow reference, response by response."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from controller.tracking.record.step_tokens import StepTokens
from splitppo.batch import Batch, Column
from tests.support.recorded import random_experience, record_config

LENGTHS = [7, 0, 1, 12, 4]


def test_the_numbers_of_each_response_are_those_of_a_loop_over_its_tokens(tmp_path: Path) -> None:
    experience, _ = random_experience(record_config(tmp_path), LENGTHS)
    numbers = StepTokens.of(experience).numbers
    columns = {
        name: [row.astype(np.float64) for row in column.rows()] for name, column in experience.batch.columns.items()
    }
    rewards = experience.rewards.rows()
    for row, length in enumerate(LENGTHS):
        d = columns["old_log_probs"][row] - columns["ref_log_probs"][row]
        mismatch = np.abs(columns["old_log_probs"][row] - columns["rollout_log_probs"][row])
        values, returns = columns["values"][row], columns["returns"][row]
        expected = {
            "length": length,
            "prompt_length": 2,
            "learned": length,
            "reward": rewards[row].sum(),
            "advantage_sum": columns["advantages"][row].sum(),
            "kl": d.mean() if length else np.nan,
            "k3": (np.exp(-d) + d - 1.0).mean() if length else np.nan,
            "mismatch": mismatch.mean() if length else np.nan,
            "value_first": values[0] if length else np.nan,
            "value_last": values[-1] if length else np.nan,
            "return_first": returns[0] if length else np.nan,
            "value_error": np.sqrt(((values - returns) ** 2).mean()) if length else np.nan,
        }
        for name, number in expected.items():
            assert numbers[name][row] == pytest.approx(number, rel=1e-5, abs=1e-6, nan_ok=True), (name, row)


def test_tokens_of_an_environment_count_for_no_number(tmp_path: Path) -> None:
    experience, _ = random_experience(record_config(tmp_path), [4])
    mask = Column(np.array([True, False, False, True]), np.array([4], np.int32))
    old, ref = (experience.batch[name].values for name in ("old_log_probs", "ref_log_probs"))
    numbers = StepTokens.of(replace(experience, learned=mask, counted=mask)).numbers
    assert numbers["learned"].tolist() == [2]
    assert numbers["kl"][0] == pytest.approx(np.mean([old[0] - ref[0], old[3] - ref[3]]), rel=1e-5)
    assert numbers["value_last"][0] == pytest.approx(experience.batch["values"].values[3])


def test_a_response_that_is_not_learned_from_counts_all_the_same(tmp_path: Path) -> None:
    config = record_config(tmp_path, algorithm__mask_truncated_completions=True)
    experience, _ = random_experience(config, [3, 4], is_truncated=np.array([True, False]))
    tokens = StepTokens.of(experience)
    assert tokens.counts.all()
    assert tokens.numbers["learned"].tolist() == [0, 4]
    assert np.isfinite(tokens.numbers["kl"]).all()
    assert np.isnan(tokens.numbers["value_error"][0])


def test_without_values_reference_and_rollout_there_are_no_numbers_of_them(tmp_path: Path) -> None:
    config = record_config(tmp_path, num_samples=2, algorithm__adv_estimator="grpo")
    experience, _ = random_experience(config, [3, 3], columns=("old_log_probs",))
    assert not {"kl", "k3", "mismatch", "value_first", "value_error"} & {*StepTokens.of(experience).numbers}


def test_log_probs_that_stand_for_those_of_the_rollout_backend_have_no_mismatch(tmp_path: Path) -> None:
    config = record_config(tmp_path, algorithm__rollout_correction__bypass_mode=True)
    experience, _ = random_experience(config, [3, 3])
    assert "mismatch" not in StepTokens.of(experience).numbers


def tokens_of(rows: list[list[int]], tmp_path: Path) -> StepTokens:
    experience, _ = random_experience(record_config(tmp_path), [len(row) for row in rows])
    ids = Column.from_rows(rows, np.dtype(np.int32))
    batch = experience.batch.merge(Batch(len(rows), {"responses": ids}))
    return StepTokens.of(replace(experience, batch=batch))


def test_repetition_is_the_share_of_pieces_of_four_tokens_that_were_there_before(tmp_path: Path) -> None:
    rows = [[1, 2, 3, 4, 5, 6], [1, 1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3], []]
    numbers = tokens_of(rows, tmp_path).numbers
    assert numbers["repetition"].tolist() == pytest.approx([0.0, 3 / 4, 1 / 5, 0.0, 0.0])


def test_equal_responses_have_equal_hashes_and_others_do_not(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [3, 2, 1], [1, 2, 3], [1, 2], [2, 2, 3], [1, 2, 3, 0]]
    hashes = tokens_of(rows, tmp_path).numbers["text_hash"].tolist()
    assert hashes[0] == hashes[2]
    assert len({*hashes}) == 5
    assert tokens_of(rows[::-1], tmp_path).numbers["text_hash"].tolist() == hashes[::-1]
