"""What an exported file holds: whole steps within its size, and a sentence for what cannot be read."""

from __future__ import annotations

import base64
import gzip
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitppo.run_folder import rollouts
from tests.support.viewed_runs import Shape, add_event, make_run, write_live
from viewer import answers
from viewer.__main__ import main
from viewer.one_file.export import spread

pytestmark = pytest.mark.slow


def export(tmp_path: Path, *more: str) -> dict[str, Any]:
    """Exports the runs of a folder; returns the answers by their addresses."""
    file = tmp_path / "run.html"
    assert main(["export", str(tmp_path), "--out", str(file), *more]) == 0
    found = re.search(r'id="saved">(.*?)</script>', file.read_text())
    assert found
    saved = json.loads(found[1])
    return {address: json.loads(gzip.decompress(base64.b64decode(text))) for address, text in saved.items()}


def test_the_file_keeps_its_size_and_has_whole_steps_that_matter_most(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=30, prompts=4))
    add_event(run, {"kind": "group_lost", "role": "critic"}, step=7)
    saved = export(tmp_path, "--max-mb", "0.6")
    assert 0.4e6 < (tmp_path / "run.html").stat().st_size <= 0.6e6
    steps = saved["runs/0"]["train"]
    assert {30, 1, 7} <= set(steps)
    assert len(steps) < 30
    assert steps == sorted(steps)
    for step in steps:
        columns = saved[f"runs/0/train/{step}"]["columns"]
        rows = {row for row, why in zip(columns["row"], columns["why"], strict=True) if why}
        assert rows == {int(one.rpartition("/")[2]) for one in saved if one.startswith(f"runs/0/train/{step}/")}
    assert len(saved["runs/0/columns"]["steps"]) == 30


def test_steps_and_validations_are_counted_apart_and_each_file_is_opened_once_for_all_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run", Shape(steps=8, prompts=3))
    opened: list[tuple[str, int]] = []

    def count(folder: Any, kind: str, step: int, rows: Any) -> Any:
        opened.append((kind, step))
        return rollouts.read_rows(folder, kind, step, rows)

    monkeypatch.setattr(answers, "read_rows", count)
    saved = export(tmp_path)
    num_responses = sum(len(one.split("/")) == 5 and one.split("/")[2] in ("train", "val") for one in saved)
    assert f" {num_responses} responses of 8 steps and 2 validations\n" in capsys.readouterr().out
    assert sorted(opened) == [*(("train", step) for step in range(1, 9)), ("val", 4), ("val", 8)]


def test_the_answers_to_the_prompts_of_validations_are_there(tmp_path: Path) -> None:
    make_run(tmp_path / "run", Shape(steps=8, prompts=3))
    saved = export(tmp_path)
    for prompt in saved["runs/0/prompts"]["prompts"]:
        rows = saved[f"runs/0/prompts/{prompt['prompt_index']}"]["rows"]
        assert [row["step"] for row in rows] == [8] * 4 + [4] * 4
    assert saved["runs/0/config"]["keys"]["run.seed"] == "1"


def test_logs_of_losses_and_all_steps_of_the_timeline_are_there(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=5, prompts=2, samples=2, with_trace=True))
    (run / "logs").mkdir()
    (run / "logs" / "controller_0.log").write_text("the last words\n")
    add_event(run, {"kind": "group_lost", "role": "critic", "rank": 0}, step=3)
    number = len((run / "events.jsonl").read_text().splitlines()) - 1
    saved = export(tmp_path)
    assert saved[f"runs/0/log/{number}"][-1]["lines"] == ["the last words"]
    steps = {int(one.rpartition("/")[2]) for one in saved if one.startswith("runs/0/timeline/")}
    assert steps == {*saved["runs/0/timeline"]["steps"]["step"]} >= {1, 2, 3, 4, 5}


def test_a_loss_whose_step_is_none_ends_no_export(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=2))
    add_event(run, {"kind": "group_lost", "role": "critic", "rank": 0, "step": [1]})
    assert "runs/0/train/1" in export(tmp_path)


def test_a_size_that_not_even_the_curves_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", Shape(steps=3))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "run.html"), "--max-mb", "0.1"]) == 2
    assert capsys.readouterr().err.startswith("error: --max-mb 0.1: the pages and the curves of these runs alone take")
    assert not (tmp_path / "run.html").exists()


@pytest.mark.parametrize(
    ("folder", "out", "sentence"),
    [
        ("none", "run.html", "none is no folder"),
        ("run", "run/config.yaml/run.html", "config.yaml"),
        ("run", "run", "this is no plain file"),
        ("run", "/dev/null", "this is no plain file"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, out: str, sentence: str
) -> None:
    make_run(tmp_path / "run", Shape(steps=1))
    assert main(["export", str(tmp_path / folder), "--out", str(tmp_path / out)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert sentence in told
    assert len(told.splitlines()) == 1


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    make_run(tmp_path / "run", Shape(steps=1))
    (tmp_path / "run.html").symlink_to(tmp_path / "there.html")
    export(tmp_path)
    assert (tmp_path / "run.html").is_symlink()
    assert (tmp_path / "there.html").stat().st_size > 0


def test_links_that_lead_to_each_other_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", Shape(steps=1))
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "a" / "run.html")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_torn_step_is_a_sentence_in_the_file_and_a_run_that_still_works_has_a_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=4), ended=False)
    write_live(run, step=4, total=9, phase="training")
    (run / "rollouts" / "train" / "4.parquet").write_bytes(b"PAR1")
    saved = export(tmp_path)
    assert "torn" in saved["runs/0/train/4"]["unreadable"]
    assert saved["runs/0"]["state"] == saved["runs"]["runs"][0]["state"] == "saved"
    assert saved["runs/0"]["sentence"].startswith("as of 20")


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=70).map(sorted))
def test_every_beginning_of_the_order_covers_the_steps(steps: list[int]) -> None:
    found = spread(steps)
    assert sorted(found) == steps
    assert found[:2] == list(dict.fromkeys([*steps[-1:], *steps[:1]]))
    if len(steps) > 4:
        places = sorted(steps.index(step) for step in found[: len(steps) // 2])
        assert max(b - a for a, b in pairwise(places)) <= 4
