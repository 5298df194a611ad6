"""Finds public data sets, which are not in this repository, in the folder that an environment variable names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "SPLITPPO_TEST_DATA"
# recipe: the options of its prepare.py; those that name files are relative to the folder.
FILES = {
    "gsm8k": {"--input": "gsm8k"},
    "competition_math": {"--input": "math/train_answers_only.jsonl", "--test-file": "math/test.jsonl"},
    "hellaswag": {"--input": "hellaswag/hellaswag_rubriks1000.jsonl"},
    "hh_rlhf": {"--input": "hh/harmless-base_test.jsonl.gz"},
}
TEST_ROWS = {"hellaswag": 200, "hh_rlhf": 312}


def absence() -> str | None:
    """Returns a sentence on why there are no data sets; None if the variable names a folder."""
    folder = os.environ.get(VARIABLE, "")
    expected = "expected the folder of the data sets that tests read"
    if not folder:
        return f"{VARIABLE} is not set: {expected}"
    return None if Path(folder).is_dir() else f"{VARIABLE} is {folder!r}, and there is no such folder: {expected}"


def data_file(name: str) -> Path:
    """Returns a file or folder of the data sets; skips the test if it is missing."""
    if reason := absence():
        pytest.skip(f"needs {name}: {reason}")
    file = Path(os.environ[VARIABLE]) / name
    if not file.exists():
        pytest.skip(f"needs {name}, which is not in {VARIABLE}={os.environ[VARIABLE]}")
    return file


def real_rows(recipe: str) -> list[str]:
    """Returns arguments for a recipe's prepare.py; skips the test if its rows are missing."""
    arguments = [part for option, name in FILES[recipe].items() for part in (option, str(data_file(name)))]
    if recipe in TEST_ROWS:
        arguments += ["--test-rows", str(TEST_ROWS[recipe])]
    return arguments
