"""The HellaSwag scorer: the letter that a response chooses."""

from __future__ import annotations

import pytest

from rewards.scorers.hellaswag import compute_score


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("He lifts a tile.\n#### B", "B"),
        ("####B\n", "B"),
        ("#### b", "B"),
        ("#### (C)", "C"),
        ("#### **D**", "D"),
        ("#### B. lifts a tile.", "B"),
        ("#### A) swims\nas nobody else would", "A"),
        ("####\n\nC", "C"),
        ("#### A, no:\n#### B", "B"),
        ("#### A man swims", None),
        ("#### Because", None),
        ("#### ", None),
        ("B", None),
        ("", None),
    ],
)
def test_the_letter_stands_behind_the_last_marker(response: str, letter: str | None) -> None:
    scores = {chr(ord("A") + number): compute_score("Rowan/hellaswag", response, number) for number in range(4)}
    assert scores == {label: float(label == letter) for label in "ABCD"}


def test_a_label_may_be_a_text() -> None:
    assert compute_score("Rowan/hellaswag", "#### D", "3") == 1.0
