"""Scores as arrays: joined and taken row by row, and their named components."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from controller.ppo.scores import Scores, Text, objects
from splitppo.batch import Column
from splitppo.config import ConfigError
from tests.support.scores import make_scores


def scores_of(*scores: float, extra: dict[str, Any] | None = None, **columns: Any) -> Scores:
    fields = {
        "texts": objects(Text("p", f"answer {score}", "t") for score in scores),
        "extra": objects([extra or {}] * len(scores)),
        "data_sources": objects(["letters"] * len(scores)),
    }
    return make_scores(np.array(scores, np.float32), **{**fields, **columns})


def test_parts_are_joined_in_their_order_and_rows_are_taken_in_any() -> None:
    joined = Scores.join(
        [
            scores_of(1.0, extra={"acc": 0.5}),
            scores_of(2.0, has_eos=np.array([False])),
            scores_of(3.0, extra={"format": 1.0}, token_scores=Column.from_rows([[1.0, 2.0]], np.dtype(np.float32))),
        ]
    )
    assert joined.scores.tolist() == [1.0, 2.0, 3.0]
    assert joined.scores.dtype == np.float32
    assert joined.has_eos.tolist() == [True, False, True]
    assert joined.extra_columns == {"acc": [0.5, None, None], "format": [None, None, 1.0]}
    assert [row.tolist() for row in joined.token_scores.rows()] == [[], [], [1.0, 2.0]]
    assert joined.model_scores is None
    taken = joined.take(np.array([2, 0]))
    assert [text.response for text in taken.texts] == ["answer 3.0", "answer 1.0"]
    assert taken.extra_columns == {"format": [1.0, None], "acc": [None, 0.5]}
    assert [row.tolist() for row in taken.token_scores.rows()] == [[1.0, 2.0], []]


def test_objects_are_kept_whole_also_where_they_are_sequences() -> None:
    assert objects([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    assert objects([[1, 2], [3, 4]]).shape == (2,)


def test_components_are_numeric_fields_and_0_where_a_response_has_none() -> None:
    scores = Scores.join(
        [scores_of(1.0, extra={"right": True, "why": "yes"}), scores_of(2.0, 3.0), scores_of(4.0, extra={"right": 0.5})]
    )
    parts_KB = scores.components(["right", "score"])
    assert parts_KB is not None
    assert parts_KB.tolist() == [[1.0, 0.0, 0.0, 0.5], [1.0, 2.0, 3.0, 4.0]]
    assert parts_KB.dtype == np.float32
    assert scores.components([]) is None
    with pytest.raises(
        ConfigError, match=r"'algorithm.gdpo_reward_keys': no response has the field 'rigth'; known: sc"
    ):
        scores.components(["rigth"])
    expected = r"expected a finite number of at most 1e\+12 in the field"
    with pytest.raises(ConfigError, match=rf"{expected} 'why', got 'yes' for .* 'letters'"):
        scores.components(["why"])
    for wrong in ("nan", "1e+300"):
        with pytest.raises(ConfigError, match=rf"{expected} 'right', got {re.escape(wrong)}"):
            scores_of(1.0, extra={"right": float(wrong)}).components(["right"])
