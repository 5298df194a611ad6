"""What the server says of trace.json, also of one that no run writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from splitppo.run_folder.files import MAX_LINE_BYTES
from splitppo.run_folder.metrics import FIGURES
from splitppo.run_folder.step_spans import Steps
from splitppo.run_folder.trace import read_trace
from tests.support.viewed_runs import Shape, add_event, make_run
from tests.support.viewed_traces import T0, spans_of, write_trace
from tests.support.viewer_client import ask
from viewer.spans import MAX_STEP_SPANS

SHAPE = Shape(steps=3, prompts=2, samples=2, with_trace=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", SHAPE)


async def answer(run: Path, path: str = "") -> Any:
    found = await ask([run], f"/api/runs/0/timeline{path}")
    assert found.status in (200, 422), found.content
    return found.json


def event(**other: Any) -> dict[str, Any]:
    made = {"ph": "X", "cat": "actor", "name": "gen", "ts": T0 * 1e6, "dur": 1e6, "args": {"step": 1}}
    return {**made, **other}


def write_events(run: Path, events: Sequence[Any]) -> None:
    (run / "trace.json").write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]")


async def test_a_step_has_the_numbers_of_the_figures(run: Path) -> None:
    steps = Steps(read_trace(run / "trace.json"))
    table, found = await answer(run), await answer(run, "/2")
    first = table["unix_s"]
    start, end, next_start = steps.times(2)
    assert (found["start"], found["end"], found["next_start"]) == pytest.approx(
        (start - first, end - first, next_start - first), abs=1e-6
    )
    assert found["busy"] == pytest.approx(steps.busy(2), abs=1e-6)
    path = steps.critical_path(2)
    assert [(one["pool"], one["name"], one["step"]) for one in found["path"]] == [
        (one.pool, one.name, one.step) for one in path
    ]
    assert [one["end"] - one["start"] for one in found["path"]] == pytest.approx(
        [one.duration_s for one in path], abs=3e-6
    )


async def test_work_that_a_recovery_cut_out_is_marked_and_belongs_to_no_step(run: Path) -> None:
    table = await answer(run)
    lost = sum(table["columns"]["lost"])
    assert lost == len(spans_of(2))
    assert len(table["columns"]["start"]) == lost + 3 * len(spans_of(1))
    assert table["columns"]["start"] == sorted(table["columns"]["start"])
    assert table["columns"]["start"][0] == 0.0 == table["unix_s"] - (T0 + 2 * 1.1 - 3)
    assert table["steps"]["step"] == [1, 2, 3]
    assert table["phases"][0] == ["gen", "generate", "#4c78a8", True]
    assert table["sentence"] is None


async def test_a_trace_that_grows_is_read_again(run: Path) -> None:
    before = await answer(run)
    write_trace(run, [span for step in range(1, 5) for span in spans_of(step)])
    assert (await answer(run))["steps"]["step"] == [*before["steps"]["step"], 4]


async def test_a_run_without_a_trace_and_a_step_without_work_are_one_sentence(run: Path) -> None:
    assert await answer(run, "/9") == {"error": "trace.json has no span of step 9."}
    (run / "trace.json").unlink()
    for path in ("", "/2"):
        assert (await answer(run, path))["error"].startswith("trace.json cannot be read")


@pytest.mark.parametrize(
    "other",
    [
        {"cat": "moon"},
        {"cat": ["actor"]},
        {"name": ["gen"]},
        {"name": {"gen": 1}},
        {"name": ""},
        {"name": "x" * 100_000},
        {"ts": float("nan")},
        {"ts": float("inf")},
        {"ts": 10**400},
        {"ts": "1"},
        {"dur": -5},
        {"dur": 1e300},
        {"args": {"step": float("inf")}},
        {"args": {"step": -1}},
        {"args": {"step": 10**30}},
        {"args": [1]},
    ],
    ids=lambda other: str(other)[:40],
)
async def test_what_no_run_writes_is_left_out(run: Path, other: dict[str, Any]) -> None:
    write_events(run, [event(), event(**other)])
    columns = (await answer(run))["columns"]
    assert [lost for lost in columns["lost"] if not lost] == [0]


async def test_a_trace_of_any_bytes_and_a_link_end_nothing(run: Path, tmp_path: Path) -> None:
    trace = run / "trace.json"
    for content in (b"", b"\x00\xff\xfe", b"[" * 1_000_000, b"null\n[]\n{}\n7"):
        trace.write_bytes(content)
        assert not [lost for lost in (await answer(run))["columns"]["lost"] if not lost]
    trace.unlink()
    (tmp_path / "secret").write_text(json.dumps(event()))
    trace.symlink_to(tmp_path / "secret")
    assert (await answer(run))["error"].startswith("trace.json cannot be read")


async def test_a_line_that_is_too_long_is_left_out(run: Path) -> None:
    write_events(run, [event(name="before"), event(name="long", more="x" * MAX_LINE_BYTES), event(name="after")])
    assert {name for name, *_ in (await answer(run))["phases"]} & {"before", "long", "after"} == {"before", "after"}


async def test_lost_spans_that_are_none_are_left_out(run: Path) -> None:
    rows = [None, 7, [], ["actor", "gen", 1, 2], ["moon", "gen", 1, 1, 2], [["actor"], "gen", 1, 1, 2]]
    rows += [
        ["actor", {}, 1, 1, 2],
        ["actor", "gen", "1", 1, 2],
        ["actor", "gen", 1, 2, 1],
        ["actor", "gen", True, 1, 2],
    ]
    add_event(run, {"kind": "cut", "spans": [*rows, ["actor", "gen", 1, T0, T0 + 1]]})
    add_event(run, {"kind": "cut", "spans": {"a": 1}})
    assert sum((await answer(run))["columns"]["lost"]) == len(spans_of(2)) + 1


async def test_a_name_that_is_no_phase_has_itself_as_its_label(run: Path) -> None:
    write_events(run, [event(name="1")])
    assert ["1", "1", "#8a99a6", False] in (await answer(run))["phases"]


async def test_a_step_of_too_many_spans_is_one_sentence(run: Path) -> None:
    write_events(run, [event()] * (MAX_STEP_SPANS + 1))
    assert (await answer(run, "/1"))["error"].endswith("expected at most 5,000.")


async def test_the_cards_of_the_pages_are_the_figures_of_the_table(run: Path) -> None:
    sent = (await ask([run], "/api/runs/0")).json
    names = [name for name, *_ in sent["metrics"]]
    report = [figure for figure in FIGURES if "report" in figure.pages]
    told = {one["title"]: one for one in sent["figures"]}
    assert len(told) == len(FIGURES)
    for figure in report:
        one = told[f"{figure.title}, {figure.unit}"]
        assert (one["metrics"], one["range"]) == (figure.curves(names), [figure.floor, figure.ceiling])
        assert "overview" in one["pages"]
