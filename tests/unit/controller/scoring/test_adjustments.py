"""Adjustments of scores: the reward model's share, overlong penalties, marks of truncation."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from controller.ppo.scores import Scores, objects
from controller.scoring.adjustments import (
    add_model_scores,
    mark_truncated,
    overlong_penalties,
    subtract_overlong,
    without_model_scores,
    without_scores,
)
from controller.tracking.rollout_dump import rollout_rows
from controller.tracking.step_metrics import reward_model_metrics
from splitppo.batch import Column
from splitppo.config import ConfigError
from splitppo.config.sections.reward import OverlongBuffer
from splitppo.run_folder.append_log import json_line
from tests.support.scores import make_scores


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def scores_of(*scores: float, **columns: Any) -> Scores:
    return make_scores(floats(*scores), **columns)


def test_rule_and_model_are_added_with_the_weight_of_the_data_source() -> None:
    rule_scores = floats(1.0, 2.0, np.nan)
    scores = scores_of(1.0, 2.0, 0.0, data_sources=objects("aab"), rule_scores=rule_scores)
    coefs = {"a": 0.5, "b": 2.0}
    assert reward_model_metrics(scores) == {}
    combined = add_model_scores(scores, floats(-1.0, 0.25, 3.0), coefs.__getitem__)
    assert combined.scores.tolist() == [0.5, 2.125, 6.0]
    assert combined.scores.dtype == np.float32
    rows = [json.loads(json_line(row)) for row in rollout_rows(combined)]
    assert [(row["rule_score"], row["model_score"]) for row in rows] == [(1.0, -1.0), (2.0, 0.25), (None, 3.0)]
    assert reward_model_metrics(combined) == {
        "reward/rule/mean": 1.5,
        "reward/rule/max": 2.0,
        "reward/rule/min": 1.0,
        "reward/model/mean": 0.75,
        "reward/model/max": 3.0,
        "reward/model/min": -1.0,
    }
    assert without_model_scores(combined).scores.tolist() == [1.0, 2.0, 0.0]


def test_without_scores_neither_responses_nor_their_tokens_have_one() -> None:
    placed = Column.from_rows([[1.0, 0.5], [0.0]], np.dtype(np.float32))
    scores = scores_of(2.0, 0.5, token_scores=placed, has_eos=np.array([True, False]))
    found = without_scores(scores)
    assert (found.scores.tolist(), found.token_scores.values.tolist()) == ([0.0, 0.0], [0.0, 0.0, 0.0])
    assert (found.scores.dtype, found.token_scores.lengths.tolist()) == (np.float32, [2, 1])
    assert found.has_eos.tolist() == [True, False]


def test_scores_that_were_combined_for_dynamic_sampling_are_combined_again_from_what_the_scorers_gave() -> None:
    placed = Column.from_rows([[1.0, 0.5]], np.dtype(np.float32))
    once = add_model_scores(scores_of(2.0, rule_token_scores=placed), floats(3.0), lambda _: 1.0, rule_coef=0.5)
    again = add_model_scores(without_model_scores(once), floats(3.0), lambda _: 1.0, rule_coef=0.5)
    assert once.token_scores.values.tolist() == again.token_scores.values.tolist() == [0.5, 0.25]
    assert once.scores.tolist() == again.scores.tolist() == [4.0]


def test_the_model_alone_counts_where_rules_weigh_nothing_and_a_penalty_stays() -> None:
    placed = Column.from_rows([[1.0, 1.0]], np.dtype(np.float32))
    punished = scores_of(1.5, rule_scores=floats(2.0), rule_token_scores=placed)  # a penalty of 0.5
    alone = add_model_scores(punished, floats(3.0), lambda _: 1.0, rule_coef=0.0)
    assert (alone.scores.tolist(), alone.rule_scores.tolist()) == ([2.5], [2.0])
    assert alone.token_scores.values.tolist() == [0.0, 0.0]


def test_a_score_of_the_model_that_is_not_finite_ends_the_run() -> None:
    with pytest.raises(ConfigError, match=r"^reward_model\.model: expected finite scores, got nan for response 1$"):
        add_model_scores(scores_of(1.0, 2.0), floats(0.0, np.nan), lambda _: 1.0)


# Overlong responses (DAPO, eq. 13, times the factor).


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.025), (90, -0.25), (95, -0.375), (100, -0.5)]
)
def test_the_penalty_grows_linearly_within_the_buffer(num_tokens: int, penalty: float) -> None:
    """The limit is 100 tokens, the last 20 of them are punished."""
    buffer = OverlongBuffer.model_validate({"enable": True, "len": 20, "penalty_factor": 0.5})
    assert overlong_penalties(buffer, np.array([num_tokens], np.int32), 100).tolist() == pytest.approx([penalty])


def test_long_responses_lose_score_and_the_rule_score_stays() -> None:
    buffer = OverlongBuffer.model_validate({"enable": True, "len": 4, "penalty_factor": 2.0})
    punished = subtract_overlong(scores_of(1.0, 2.0, rule_scores=floats(1.0, 1.0)), buffer, np.array([8, 9]), 12)
    assert punished.scores.tolist() == [1.0, 1.5]
    assert punished.scores.dtype == np.float32
    assert punished.extra_columns == {"overlong_reward": [0.0, -0.5], "overlong": [False, True]}
    assert punished.rule_scores.tolist() == [1.0, 1.0]
    silent = buffer.model_copy(update={"log": False})
    assert subtract_overlong(scores_of(1.0), silent, np.array([12]), 12).extra_columns == {}
    off = OverlongBuffer.model_validate({"len": 20})
    assert subtract_overlong(scores_of(1.0), off, np.array([12]), 12).scores.tolist() == [1.0]


@pytest.mark.parametrize(
    ("length", "has_eos", "has_stopped", "is_truncated"),
    [
        (8, False, False, True),
        (8, True, False, False),  # an EOS token was the last that was allowed
        (7, False, False, False),  # something else has ended it
        (8, False, True, False),  # a stop text was completed by the last token
        (0, False, False, False),
    ],
)
def test_a_response_was_cut_off_if_nothing_but_its_length_has_ended_it(
    length: int, has_eos: bool, has_stopped: bool, is_truncated: bool
) -> None:
    scores = scores_of(1.0, has_eos=np.array([has_eos]), has_stopped=np.array([has_stopped]))
    assert scores.is_truncated.tolist() == [False]
    assert mark_truncated(scores, np.array([length]), 8).is_truncated.tolist() == [is_truncated]
