"""The meaning of rollout_rs and its thresholds."""

import math
from pathlib import Path

import pytest

from splitppo.config import dump_config
from tests.support.configs import load


def rejections(tmp_path: Path, *overrides: str) -> list[tuple[str, float | None, float]]:
    config = load(tmp_path, *(f"algorithm.rollout_correction.{override}" for override in overrides))
    return [(each.option, each.lower, each.upper) for each in config.algorithm.rollout_correction.rejections]


@pytest.mark.parametrize("threshold", ['"0.5_2.0"', "2.0", '"2"'])
def test_bounds_of_a_ratio_are_two_numbers_or_the_upper_one(tmp_path: Path, threshold: str) -> None:
    found = rejections(tmp_path, "rollout_rs=token_k1", f"rollout_rs_threshold={threshold}")

    assert found == [("token_k1", pytest.approx(-math.log(2.0)), pytest.approx(math.log(2.0)))]


def test_several_criteria_have_a_threshold_each_or_share_one(tmp_path: Path) -> None:
    both = "rollout_rs='seq_sum_k1, token_k3'"

    assert rejections(tmp_path, both, "rollout_rs_threshold='1.0_2.0, 0.1'") == [
        ("seq_sum_k1", 0.0, pytest.approx(math.log(2.0))),
        ("token_k3", None, 0.1),
    ]
    assert [upper for _, _, upper in rejections(tmp_path, both, "rollout_rs_threshold=1")] == [0.0, 1.0]


def test_rollout_correction_is_off_by_default_and_survives_a_dump(tmp_path: Path) -> None:
    assert not load(tmp_path).algorithm.rollout_correction.is_active
    config = load(
        tmp_path,
        "algorithm.rollout_correction={rollout_is: token, rollout_rs: token_k1, rollout_rs_threshold: 0.5_2.0}",
    )
    assert config.algorithm.rollout_correction.is_active
    assert load(tmp_path, text=dump_config(config)) == config
