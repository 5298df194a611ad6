"""Forced lengths of responses: functions of the sampling seed, distributed as their names say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.rollout.protocol import Sampling
from services.rollout.stopping import load_stop_rule
from splitppo.config import ConfigError
from splitppo.config.subsections.response_lengths import LogNormalLengths, UniformLengths
from tests.support.fake_services import make_config

SEEDS = range(4000)


def test_uniform_lengths_take_every_value_of_their_range_equally_often() -> None:
    lengths = [UniformLengths(kind="uniform", low=8, high=11).of(seed) for seed in SEEDS]
    values, counts = np.unique(lengths, return_counts=True)
    assert values.tolist() == [8, 9, 10, 11]
    assert counts == pytest.approx(1000, abs=120)


def test_log_normal_lengths_have_their_median_spread_and_limit() -> None:
    rule = LogNormalLengths(kind="log_normal", median=40.0, max=512)
    lengths = np.array([rule.of(seed) for seed in SEEDS])
    assert np.median(lengths) == pytest.approx(40, abs=3)
    assert np.log(lengths).std() == pytest.approx(1.0, abs=0.05)
    assert lengths.max() == 512
    assert lengths.min() >= 1


def test_the_same_seed_gives_the_same_length_everywhere() -> None:
    rule = UniformLengths(kind="uniform", low=1, high=1000)
    assert [rule.of(seed) for seed in (0, 1, 2**62, -1)] == [710, 744, 635, 249]


def test_a_rule_replaces_every_other_end_and_needs_no_tokenizer(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, debug__response_lengths={"kind": "uniform", "low": 3, "high": 3}, rollout__stop=["x"]
    )
    rule = load_stop_rule(None, config)  # type: ignore[arg-type]  # no stop token is asked for
    assert (rule.token_ids, rule.texts) == (frozenset(), ())
    assert [rule.max_tokens(5, Sampling(1.0, 1.0, 0, length)) for length in (2, 9)] == [2, 3]


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ({"kind": "uniform", "low": 9, "high": 8}, "low must not exceed high, got 9 and 8"),
        ({"kind": "fixed", "low": 9}, "'uniform', 'log_normal'"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(tmp_path: Path, rule: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        make_config(tmp_path, debug__response_lengths=rule)
    assert "debug.response_lengths" in str(refused.value)
