"""JSONL files: every object with the number of its line, and lines that a crash has left incomplete."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitppo.jsonl import read_jsonl


def test_objects_come_with_their_lines_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\n\n  \n{"b": "é"}')
    assert list(read_jsonl(file)) == [(1, {"a": 1}), (4, {"b": "é"})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{a", r"a\.jsonl, line 2: not valid JSON: [^()]*, at column 2$"),  # one number of a line
        (b'{"a": 1', r"a\.jsonl, line 2: not valid JSON: [^()]*, at column 8$"),
        (b"[1]", r"a\.jsonl, line 2: expected a JSON object, got list"),
        (b"\xff", r"a\.jsonl, line 2: not UTF-8 text"),
        (b"[" * 100_000, r"a\.jsonl, line 2: not valid JSON: "),
    ],
)
def test_a_line_that_is_no_object_is_named_unless_it_is_the_last_one_and_may_be_torn(
    tmp_path: Path, line: bytes, message: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n' + line + b'\n\n{"a": 3}\n')
    for until_torn in (False, True):
        with pytest.raises(ValueError, match=message):
            list(read_jsonl(file, until_torn=until_torn))
    file.write_bytes(b'{"a": 1}\n' + line + b"\n\n")
    with pytest.raises(ValueError, match=message):
        list(read_jsonl(file))
    assert list(read_jsonl(file, until_torn=True)) == [(1, {"a": 1})]


def test_a_last_line_without_its_end_counts_as_torn(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}')
    assert list(read_jsonl(file, until_torn=True)) == [(1, {"a": 1})]
