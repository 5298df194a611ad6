"""The data sets of the tests: the folder where they are searched, and the sentence if they are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.datasets import FILES, VARIABLE, absence, data_file, real_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def test_a_file_is_found_in_the_folder_that_the_variable_names(folder: Path) -> None:
    (folder / "hellaswag").mkdir()
    file = folder / FILES["hellaswag"]["--input"]
    file.touch()
    assert data_file("hellaswag") == folder / "hellaswag"
    assert real_rows("hellaswag") == ["--input", str(file), "--test-rows", "200"]
    assert absence() is None


def test_a_test_whose_file_is_absent_is_skipped_with_its_name_and_the_variable(folder: Path) -> None:
    with pytest.raises(pytest.skip.Exception) as caught:
        real_rows("competition_math")
    assert str(caught.value) == f"needs math/train_answers_only.jsonl, which is not in {VARIABLE}={folder}"


@pytest.mark.parametrize(
    ("value", "reason"), [("", "is not set"), ("/there/is/none", "is '/there/is/none', and there is no such folder")]
)
def test_a_test_without_a_folder_is_skipped_with_the_variable(
    monkeypatch: pytest.MonkeyPatch, value: str, reason: str
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(pytest.skip.Exception) as caught:
        data_file("gsm8k")
    sentence = f"{VARIABLE} {reason}: expected the folder of the data sets that tests read"
    assert str(caught.value) == f"needs gsm8k: {sentence}"
    assert absence() == sentence


@pytest.mark.parametrize(
    ("has_folder", "given", "expected"),
    [(True, None, "{beside}"), (False, None, ""), (True, "/elsewhere", "/elsewhere")],
    ids=["beside the checkout", "nowhere", "as it is set"],
)
def test_make_names_the_folder_beside_the_checkout(
    tmp_path: Path, has_folder: bool, given: str | None, expected: str
) -> None:
    checkout, beside = tmp_path / "checkout", tmp_path / "shared" / "data"
    checkout.mkdir()
    shutil.copyfile(ROOT / "Makefile", checkout / "Makefile")
    if has_folder:
        beside.mkdir(parents=True)
    environment = {"PATH": os.environ["PATH"], **({} if given is None else {VARIABLE: given})}
    # `env #` in place of Python shows what the tests would find.
    command = ["make", "--no-print-directory", "setup", "PYTHON=env #"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert variables[VARIABLE] == expected.format(beside=beside)
