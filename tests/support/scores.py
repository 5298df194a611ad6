"""Scores of responses, with neutral values in all columns that a test does not care about."""

from __future__ import annotations

from typing import Any

import numpy as np

from controller.ppo.masked_stats import Float32s
from controller.ppo.scores import Scores, Text
from splitppo.batch import Column


def make_scores(scores_B: Float32s, **columns: Any) -> Scores:
    """Makes `Scores` from given columns; the other columns say: ended by EOS, no failure."""
    num_rows = len(scores_B)
    no_tokens = Column(np.empty(0, np.float32), np.zeros(num_rows, np.int32))
    nothing, no = np.full(num_rows, "", np.object_), np.zeros(num_rows, np.bool_)
    neutral: dict[str, Any] = {
        "rule_scores": scores_B,
        "model_scores": None,
        "token_scores": columns.get("rule_token_scores", no_tokens),
        "rule_token_scores": no_tokens,
        "has_eos": ~no,
        "has_stopped": no,
        "is_truncated": no,
        "data_sources": nothing,
        "prompt_indices": np.arange(num_rows),
        "places": nothing,
        "failures": np.full(num_rows, None, np.object_),
        "messages": nothing,
        "extra": np.full(num_rows, {}, np.object_),
        "conversations": np.full(num_rows, None, np.object_),
        "texts": np.full(num_rows, Text("", "", None), np.object_),
    }
    return Scores(scores_B, **neutral | columns)
