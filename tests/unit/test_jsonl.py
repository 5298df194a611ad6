"""JSONL files: every object with the number of its line."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from splitppo import jsonl
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
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n' + line + b'\n\n{"a": 3}\n')
    with pytest.raises(ValueError, match=message):
        list(read_jsonl(file))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_is_read_up_to_a_limit_and_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 2**20)
    file = tmp_path / name
    content = b'{"a": 1}\n{"a": "' + b"x" * 2**21 + b'"}\n'
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    lines = read_jsonl(file)
    assert next(lines) == (1, {"a": 1})
    with pytest.raises(ValueError, match=rf"{name}, line 2: it has more than 1 MiB"):
        next(lines)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl: expected a file, got a pipe"):
        list(read_jsonl(tmp_path / "a.jsonl"))
