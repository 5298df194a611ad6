"""summary.json, and the atomic writing of files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from splitppo.atomic_write import write_atomically
from splitppo.run_folder.summary import Accuracy, Overlap, Summary, ThisStart, Validation, WeightsDigests


def test_a_summary_is_read_back_equal(tmp_path: Path) -> None:
    summary = Summary(
        global_step=30,
        validation=Validation(
            before=Accuracy(overall=0.25, by_source={"sort_letters": 0.25}), after=Accuracy(overall=0.95)
        ),
        train_s=70.25,
        tokens=123_456,
        overlap=Overlap(efficiency=0.9, bubble_actor=0.1, bubble_critic=0.5),
        weights_sha256=WeightsDigests(actor="ab", critic="cd"),
        exit_reason="completed",
        this_start=ThisStart(resumed_at_step=12, wall_s=91.5),
    )
    summary.write(tmp_path / "runs" / "summary.json")
    assert Summary.model_validate_json((tmp_path / "runs" / "summary.json").read_text()) == summary


def test_what_did_not_happen_is_null(tmp_path: Path) -> None:
    start = ThisStart(resumed_at_step=0, wall_s=1.0)
    Summary(global_step=0, train_s=0.0, tokens=0, exit_reason="bad_input", this_start=start).write(
        tmp_path / "summary.json"
    )
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "global_step": 0,
        "validation": {"before": None, "after": None},
        "train_s": 0.0,
        "tokens": 0,
        "overlap": None,
        "this_start": {"resumed_at_step": 0, "wall_s": 1.0},
        "weights_sha256": {"actor": None, "critic": None},
        "exit_reason": "bad_input",
        "why": None,
        "finished": False,
        "stopped_early": False,
        "best": None,
    }


def test_the_overlap_of_a_run_is_the_mean_over_the_steps_in_which_both_roles_were_updated() -> None:
    rows = [
        {"step": step, "overlap/efficiency": share, "overlap/bubble_actor": 0.0, "overlap/bubble_critic": 0.5}
        for step, share in ((1, 0.5), (3, 1.0))
    ]
    assert Overlap.over([rows[0], {"step": 2}, rows[1]]) == Overlap(
        efficiency=0.75, bubble_actor=0.0, bubble_critic=0.5
    )
    assert Overlap.over([{"step": 2}, {"step": 3, "overlap/efficiency": None}]) is None
    with_group = Overlap.over([{**row, "overlap/bubble_rollout": row["overlap/efficiency"]} for row in rows])
    assert with_group is not None
    assert with_group.bubble_rollout == 0.75


def test_an_unknown_exit_reason_and_a_number_that_is_not_finite_are_refused() -> None:
    with pytest.raises(ValidationError, match="exit_reason"):
        Summary.model_validate({"global_step": 0, "train_s": 0, "tokens": 0, "exit_reason": "tired"})
    with pytest.raises(ValidationError, match="finite number"):
        Accuracy(overall=float("nan"))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_text_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    write_atomically(path, "grün")
    assert path.read_bytes() == "grün".encode()
    write_atomically(path, b"\x00")
    assert path.read_bytes() == b"\x00"
