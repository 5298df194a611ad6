"""Logs: torn lines, lines that are no objects, and reading while another process writes."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from splitppo import jsonl
from splitppo.run_folder import append_log
from splitppo.run_folder.append_log import AppendLog, Follower, json_line
from splitppo.run_folder.step_file import StepFile, follow_steps

WHOLE = b'{"a": 1}\n'


@pytest.fixture
def log(tmp_path: Path) -> AppendLog:
    return AppendLog(tmp_path / "a.jsonl")


def news(follower: Follower) -> list[dict[str, Any]]:
    return [*follower.read()[1]]


# One process writes.


def test_what_was_appended_is_read_again_also_where_it_begins(log: AppendLog) -> None:
    starts = [log.append(json_line({"a": number}), is_durable=number == 1) for number in range(3)]
    log.sync()
    assert [*log.objects()] == [(number + 1, {"a": number}) for number in range(3)]
    assert [log.line_at(start) for start in starts] == [json_line({"a": number}) for number in range(3)]
    assert [(line.number, line.start) for line in log.lines()] == [*enumerate(starts, start=1)]


def test_a_log_without_a_file_is_empty(log: AppendLog) -> None:
    assert [*log.objects()] == [*log.lines()] == []


@pytest.mark.parametrize("torn", [b'{"a": 2', b'{"a": 2}', b"\0\0"])
def test_a_torn_line_is_left_out_and_the_next_one_begins_a_line(log: AppendLog, torn: bytes) -> None:
    log.path.write_bytes(WHOLE + torn)
    assert [*log.objects()] == [(1, {"a": 1})]
    start = log.append(json_line({"a": 3}))
    assert log.line_at(start) == json_line({"a": 3})
    assert [line.content for line in log.lines()] == [WHOLE, torn + b"\n", json_line({"a": 3})]


def test_a_log_is_cut_after_its_last_good_line(log: AppendLog) -> None:
    log.path.write_bytes(WHOLE + b"torn")
    [line] = log.lines()
    assert [log.cut_after(line.end), log.cut_after(line.end)] == [4, 0]
    assert log.path.read_bytes() == WHOLE


def test_lines_that_a_full_disk_refuses_leave_nothing_behind(log: AppendLog) -> None:
    log.append(WHOLE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with pytest.raises(OSError, match=r"a\.jsonl"):
            log.append(json_line({"a": "x" * 100}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert log.path.read_bytes() == WHOLE


def test_only_another_content_makes_another_file(log: AppendLog) -> None:
    log.append(WHOLE)
    inode = log.path.stat().st_ino
    log.replace([WHOLE])
    assert log.path.stat().st_ino == inode
    log.replace([])
    assert (log.path.stat().st_ino == inode, log.path.read_bytes()) == (False, b"")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{a", r"a\.jsonl, line 2: not valid JSON: "),
        (b"[1]", r"a\.jsonl, line 2: expected a JSON object, got list"),
        (b"\xff", r"a\.jsonl, line 2: not UTF-8 text"),
    ],
)
def test_a_line_that_is_no_object_is_named_unless_it_is_the_last_one(log: AppendLog, line: bytes, message: str) -> None:
    log.path.write_bytes(WHOLE + line + b'\n\n{"a": 3}\n')
    with pytest.raises(ValueError, match=message):
        list(log.objects())
    log.path.write_bytes(WHOLE + line + b"\n\n")
    assert list(log.objects()) == [(1, {"a": 1})]


def test_a_line_that_is_too_long_is_named_and_read_no_further(log: AppendLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_log, "MAX_LINE_BYTES", 2**20)
    log.path.write_bytes(WHOLE + b'{"a": "' + b"x" * 2**21 + b'"}\n' + WHOLE)
    objects = log.objects()
    assert next(objects) == (1, {"a": 1})
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: it has more than 1 MiB"):
        next(objects)
    assert [len(line.content) for line in log.lines()] == [9, 2**20 + 1, 9]
    assert jsonl.MAX_LINE_BYTES > 2**20


def test_half_a_character_is_an_escape_of_json() -> None:
    line = json_line({"text": "a\ud83d"})
    assert json.loads(line) == {"text": "a\ud83d"}
    assert line.isascii()


# Another one reads meanwhile.


def test_a_line_that_is_being_written_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = follow_steps(path)
    assert news(follower) == []
    with path.open("wb", buffering=0) as file:
        file.write(b'{"step": 1}\n{"st')
        assert news(follower) == [{"step": 1}]
        assert news(follower) == []
        file.write(b'ep": 2}\n')
        assert news(follower) == [{"step": 2}]


def test_who_stops_at_a_line_gets_it_again(log: AppendLog) -> None:
    for number in range(3):
        log.append(json_line({"a": number}))
    follower = Follower.of(log.path)
    for found in follower.read()[1]:
        if found["a"] == 1:
            break
    assert news(follower) == [{"a": 1}, {"a": 2}]
    follower.restart()
    assert len(news(follower)) == 3


@pytest.mark.parametrize("broken", [b'{"st\n', b"[2]\n", b'{"a": 2}\n'])
def test_a_broken_line_is_named_as_often_as_it_is_asked_for_until_it_is_mended(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\n' + broken + b'{"step": 3}\n')
    follower = follow_steps(path)
    rows = follower.read()[1]
    assert next(rows) == {"step": 1}
    for _ in range(2):
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 3: "):
            next(rows)
        rows = follower.read()[1]
    path.write_bytes(b'{"step": 1}\n\n{"step": 2}\n{"step": 3}\n')
    assert news(follower) == [{"step": 2}, {"step": 3}]


def test_lines_that_are_no_objects_or_too_many_are_counted(log: AppendLog) -> None:
    def parse(line: bytes, _: str) -> dict[str, Any] | None:
        return json.loads(line) if line.startswith(b"{") else None

    follower = Follower(lambda: log.path.open("rb"), "a.jsonl", parse=parse, max_lines=3)
    log.path.write_bytes(WHOLE + b"[1]\n\n" + WHOLE + WHOLE)
    assert news(follower) == [{"a": 1}] * 2
    assert follower.num_broken == 2


def test_a_file_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step, file in enumerate([StepFile(path)] * 3, start=1):
        file.write(step, {})
    follower = follow_steps(path)
    assert [row["step"] for row in news(follower)] == [1, 2, 3]
    StepFile(path, 2).write(3, {"a": 1})
    is_new, rows = follower.read()
    assert (is_new, [*rows]) == (True, [{"step": 1}, {"step": 2}, {"step": 3, "a": 1}])
    path.unlink()
    assert [follower.read()[0], follower.inode] == [True, 0]


def test_a_file_of_the_same_inode_with_another_beginning_is_another_file(log: AppendLog) -> None:
    log.path.write_bytes(WHOLE * 2)
    follower = Follower.of(log.path)
    assert news(follower) == [{"a": 1}] * 2
    with log.path.open("r+b") as same:  # the inode stays, and the file is longer than before
        same.write(json_line({"a": 2}) * 4)
    assert [*follower.read()[1]] == [{"a": 2}] * 4
