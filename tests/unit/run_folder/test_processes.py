"""The processes of a run: what groups tell of themselves, and the list that is made from it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from splitppo.run_folder.processes import Group, Rank, announcement, read_processes, write_processes

ACTOR = Group("actor", "127.0.0.1:5000", "abc", [Rank(rank, 100 + rank, "here") for rank in range(2)])


def test_what_a_group_announces_is_read_again(tmp_path: Path) -> None:
    assert Group.announced(tmp_path, "actor") is None
    ACTOR.announce(tmp_path)
    assert Group.announced(tmp_path, "actor") == ACTOR
    assert ACTOR.event() == {"role": "actor", "instance_id": "abc", "pids": [100, 101], "host": "here"}


@pytest.mark.parametrize("content", ["", "{", "[5]", '{"role": "actor"}', '{"processes": 5}', "[" * 9999])
def test_an_announcement_that_says_something_else_is_none(tmp_path: Path, content: str) -> None:
    ACTOR.announce(tmp_path)
    announcement(tmp_path, "actor").write_text(content)
    assert Group.announced(tmp_path, "actor") is None


def test_processes_json_lists_every_process_and_the_controller(tmp_path: Path) -> None:
    write_processes(tmp_path, [ACTOR])
    rows = json.loads((tmp_path / "processes.json").read_text())
    known = {"role": "actor", "address": "127.0.0.1:5000", "instance_id": "abc", "host": "here"}
    assert rows[:2] == [{**known, "rank": 0, "pid": 100}, {**known, "rank": 1, "pid": 101}]
    assert [row["role"] for row in rows] == ["actor", "actor", "controller"]
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert read_processes(tmp_path, "actor") == ACTOR.processes
    assert [rank.pid for rank in read_processes(tmp_path, "controller")] == [os.getpid()]


@pytest.mark.parametrize("content", ['{"actor": 5}', "[5]", '[{"role": "actor"}]', "xx", "[" * 9999])
def test_a_broken_list_of_processes_is_an_empty_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "processes.json").write_text(content)
    assert read_processes(tmp_path, "actor") == []
