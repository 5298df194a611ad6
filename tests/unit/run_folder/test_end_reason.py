"""The reason that a group which ends leaves in the run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitppo.run_folder.end_reason import read_end_reason, write_end_reason

FILE = Path("services") / "actor.failure.json"


def test_the_reason_of_an_instance_is_read_as_it_was_written_and_is_no_other_instances(tmp_path: Path) -> None:
    assert read_end_reason(tmp_path, "actor", "first") is None
    write_end_reason(tmp_path, "actor", "first", "rank 1 on zwei failed: „out of memory“\nin forward")
    assert read_end_reason(tmp_path, "actor", "first") == "rank 1 on zwei failed: „out of memory“\nin forward"
    assert read_end_reason(tmp_path, "actor", "second") is None
    assert read_end_reason(tmp_path, "critic", "first") is None
    write_end_reason(tmp_path, "actor", "second", "rank 0 failed")
    assert read_end_reason(tmp_path, "actor", "first") is None


def test_a_folder_that_cannot_be_written_keeps_no_group_from_ending(tmp_path: Path) -> None:
    (tmp_path / "services").touch()
    write_end_reason(tmp_path, "actor", "first", "rank 1 failed")
    assert read_end_reason(tmp_path, "actor", "first") is None


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"instance_id": "first"}', '{"instance_id": "first", "reason": 1}']
)
def test_a_file_that_somebody_has_broken_is_no_reason(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text(content)
    assert read_end_reason(tmp_path, "actor", "first") is None
