"""The common behaviour of all prepare.py: sources of rows, mistakes in them, and what is written, printed and kept."""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.gsm8k.prepare import RECIPE, main
from recipes.preparation import find_files, shown
from recipes.rows import BadInput, read_rows, write_parquet

EXAMPLES = [
    {"question": "Ann has 2 boxes of 600 nails. How many nails?", "answer": "2*600 = <<2*600=1200>>1200\n#### 1,200"},
    {"question": "Bo owes $3 and pays $5. What is left?", "answer": "3-5 = -2\n#### -2"},
]
Write = Callable[[str, Sequence[Any]], Path]


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., int]:
    """GSM8K's, into `tmp_path / "out"`."""
    return lambda *more: main(["--output", str(tmp_path / "out"), "--no-tiny-model", *map(str, more)])


@pytest.fixture
def sentence(prepare: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line that says what is wrong with an input; nothing is written."""

    def refused(*more: Any) -> str:
        assert prepare(*more) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("error: ")
        assert printed.err.count("\n") == 1
        assert not (tmp_path / "out").exists()
        return printed.err.removeprefix("error: ")

    return refused


def indices(tmp_path: Path) -> dict[str, list[int]]:
    tables = {split: pq.read_table(tmp_path / "out" / f"{split}.parquet") for split in ("train", "test")}
    return {split: [row["extra_info"]["index"] for row in table.to_pylist()] for split, table in tables.items()}


def test_both_splits_of_a_folder_are_written(prepare: Callable[..., int], write: Write, tmp_path: Path) -> None:
    write("train.jsonl", EXAMPLES)
    write("test.jsonl", EXAMPLES[:1])
    assert prepare("--input", tmp_path) == 0
    assert indices(tmp_path) == {"train": [0, 1], "test": [0]}


def test_the_last_rows_of_a_file_can_be_the_test_split(
    prepare: Callable[..., int], write: Write, tmp_path: Path
) -> None:
    file = write("all.jsonl", [*EXAMPLES, EXAMPLES[0]])
    assert prepare("--input", file, "--test-rows", 1) == 0
    assert indices(tmp_path) == {"train": [0, 1], "test": [0]}


def test_another_file_can_be_the_test_split(prepare: Callable[..., int], write: Write, tmp_path: Path) -> None:
    train, test = write("a.jsonl", EXAMPLES), write("b.jsonl", EXAMPLES[:1])
    assert prepare("--input", train, "--test-file", test) == 0
    assert indices(tmp_path) == {"train": [0, 1], "test": [0]}


def test_the_hubs_parquet_files_are_read_as_well(tmp_path: Path) -> None:
    for folder in ("main", "socratic"):
        (tmp_path / folder).mkdir()
        for split in ("train", "test"):
            for part, example in enumerate(EXAMPLES):
                file = tmp_path / folder / f"{split}-0000{part}-of-00002.parquet"
                pq.write_table(pa.Table.from_pylist([example]), file)
    files = find_files(str(tmp_path), RECIPE.files)
    assert {file.parent.name for of_split in files.values() for file in of_split} == {"main"}
    assert [dict(fields) for file in files["train"] for _, fields in read_rows(file)] == EXAMPLES


def test_packed_lines_are_unpacked(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(EXAMPLES[0]).encode()))
    assert read_rows(file) == [(f"{file}, line 1", EXAMPLES[0])]


def test_what_is_there_with_the_same_bytes_is_left_alone(
    prepare: Callable[..., int],
    write: Write,
    version_of: Callable[[Path], tuple[int, int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write("all.jsonl", EXAMPLES)
    prepare("--input", file, "--test-rows", 1)
    assert "up to date" not in capsys.readouterr().out
    before = {file: version_of(file) for file in (tmp_path / "out").iterdir()}
    prepare("--input", file, "--test-rows", 1)
    assert capsys.readouterr().out.count("up to date") == 2
    assert {file: version_of(file) for file in (tmp_path / "out").iterdir()} == before

    write("all.jsonl", [*EXAMPLES, EXAMPLES[0]])
    prepare("--input", file, "--test-rows", 1)
    assert "up to date" not in capsys.readouterr().out.splitlines()[0]
    assert indices(tmp_path) == {"train": [0, 1], "test": [0]}


def test_counts_and_a_row_are_printed(
    prepare: Callable[..., int], write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare("--input", write("all.jsonl", EXAMPLES), "--test-rows", 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" in ")[0] for line in lines[:2]] == ["gsm8k: 1 rows", "gsm8k: 1 rows"]
    assert "  reward_model.ground_truth: 1200" in lines


def test_texts_under_unprintable_keys_are_lengths() -> None:
    row = {"prompt": [{"role": "user", "content": "secret"}], "extra_info": {"index": 3}}
    assert list(shown(row, unprintable=["content"])) == [
        "prompt[0].role: user",
        "prompt[0].content: 6 characters",
        "extra_info.index: 3",
    ]


@pytest.mark.parametrize(
    ("second_line", "complaint"),
    [
        ('{"question": "Why?"', "not valid JSON"),
        ('["question", "answer"]', "expected a JSON object, got list"),
        ('{"question": "Why?"}', "expected a text under 'answer', the row has question"),
        ('{"question": "Why?", "answer": null}', "expected a text under 'answer', got None"),
        ('{"question": " ", "answer": "#### 1"}', "expected a text under 'question', got ' '"),
        ('{"question": "Why?", "answer": "because"}', 'the answer has no number after "####"'),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    sentence: Callable[..., str], write: Write, second_line: str, complaint: str
) -> None:
    file = write("train.jsonl", [EXAMPLES[0], second_line])
    test = write("test.jsonl", EXAMPLES)
    assert sentence("--input", test.parent).startswith(f"{file}, line 2: {complaint}")


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", b"hello\n", "line 1: not valid JSON"),
        ("a.jsonl", b"\xff\xfe\n", "line 1: not UTF-8 text"),
        ("a.parquet", b"hello", "cannot read"),
        ("a.jsonl.gz", b"hello", "cannot read"),
        ("a.jsonl.gz", gzip.compress(b'{"question": "Why?"}', mtime=0)[:-9], "cannot read"),
        ("a.csv", b"question,answer\n", "expected a file that ends in .parquet, .jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    sentence: Callable[..., str], tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    refusal = sentence("--input", file, "--test-rows", 1)
    assert complaint in refusal
    assert str(file) in refusal


@pytest.mark.parametrize("recipe", ["gsm8k", "competition_math", "hellaswag", "hh_rlhf"])
def test_every_recipe_refuses_rows_of_another_data_set_in_one_sentence(
    recipe: str, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("all.jsonl", [{"text": "hello"}] * 2)
    command = ["--input", str(file), "--test-rows", "1", "--output", str(tmp_path / "out")]
    more = ["--split", "rl"] if recipe == "hh_rlhf" else []
    assert importlib.import_module(f"recipes.{recipe}.prepare").main([*command, *more]) == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith(f"error: {file}, line 1: expected a text under '")
    assert refusal.endswith(", the row has text\n")


@pytest.mark.parametrize("rows", [[{"level": 3}, {"level": "Level 3"}], [{"question": "\ud800"}]])
def test_rows_that_parquet_cannot_hold_are_refused(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot write .*train\.parquet"):
        write_parquet(rows, tmp_path / "train.parquet")
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_no_folder_is_refused(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("all.jsonl", EXAMPLES)
    assert main(["--input", str(file), "--test-rows", "1", "--output", str(file), "--no-tiny-model"]) == 2
    assert capsys.readouterr().err.startswith(f"error: cannot write {file / 'train.parquet'}: ")


def test_a_split_that_is_not_there_is_named(sentence: Callable[..., str], write: Write) -> None:
    file = write("train.jsonl", EXAMPLES)
    assert sentence("--input", file.parent).startswith(f"{file.parent} has no test.jsonl or ")
    assert "say by --test-file or --test-rows what the test split is" in sentence("--input", file)
    assert "expected --test-file or --test-rows, got both" in sentence(
        *("--input", file, "--test-file", file, "--test-rows", 1)
    )
    assert "cannot read" in sentence("--input", file, "--test-file", file.with_name("absent.jsonl"))


@pytest.mark.parametrize("number", [0, 2, -1])
def test_the_test_split_leaves_rows_to_train_on(sentence: Callable[..., str], write: Write, number: int) -> None:
    file = write("all.jsonl", EXAMPLES)
    assert (
        sentence("--input", file, "--test-rows", number)
        == f"--test-rows: expected a number from 1 to 1, got {number}\n"
    )


def test_a_missing_folder_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"dataset folder .* does not exist"):
        find_files(str(tmp_path / "absent"), RECIPE.files)
