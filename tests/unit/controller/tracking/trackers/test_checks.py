"""Trackers that cannot be used, and the sentences about them."""

from __future__ import annotations

import pytest

from controller.tracking.trackers.checks import mlflow_problem
from controller.tracking.trackers.protocol import reason_of


@pytest.mark.parametrize(
    ("uri", "sentence"),
    [
        ("sqlite:///mlflow.db", "MLFLOW_TRACKING_URI begins with sqlite:, which the client"),
        ("file:///tmp/mlruns", "MLFLOW_TRACKING_URI begins with file:, which the client"),
        ("", "mlflow has no server: set MLFLOW_TRACKING_URI"),
    ],
)
def test_a_store_that_the_small_client_of_mlflow_cannot_use_is_refused(uri: str, sentence: str) -> None:
    assert (mlflow_problem(uri, has_database=False) or "").startswith(sentence)
    assert mlflow_problem(uri, has_database=True) is None
    assert mlflow_problem("http://127.0.0.1:5000", has_database=False) is None


def test_a_long_reason_ends_with_a_whole_sentence_or_word() -> None:
    assert reason_of(ValueError("short,\n  as it is")) == "short, as it is"
    assert reason_of(ValueError("One sentence. " * 30)).endswith("One sentence")
    long = reason_of(ValueError("word " * 100))
    assert len(long) <= 300
    assert long.endswith("word ...")
