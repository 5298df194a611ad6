"""Real rows of public data sets, which are no part of this repository: beside the checkout, where somebody put them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.groups import PROJECT

ROWS = PROJECT.parent / "shared" / "data"
NOT_THERE = "needs real rows in ../shared/data/"
# recipe: the arguments that name its rows
INPUTS = {
    "gsm8k": ["--input", str(ROWS / "gsm8k")],
    "competition_math": [
        *("--input", str(ROWS / "math" / "train_answers_only.jsonl")),
        *("--test-file", str(ROWS / "math" / "test.jsonl")),
    ],
    "hellaswag": ["--input", str(ROWS / "hellaswag" / "hellaswag_rubriks1000.jsonl"), "--test-rows", "200"],
    "hh_rlhf": ["--input", str(ROWS / "hh" / "harmless-base_test.jsonl.gz"), "--test-rows", "312"],
}


def real_rows(recipe: str) -> list[str]:
    """Arguments of a recipe's prepare.py; the test is skipped where the rows are not there."""
    arguments = INPUTS[recipe]
    for file in (Path(argument) for argument in arguments if "/" in argument):
        if not file.exists():
            pytest.skip(f"{NOT_THERE}{file.relative_to(ROWS)}")
    return arguments
