"""The timeline: Perfetto can read the file, also after a crash of its writer."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from splitppo.run_folder.spans import Span, busy_s, joined
from splitppo.run_folder.trace import Trace, read_trace

T0 = 1_760_000_000.0


def span(pool: str, name: str, step: int, start: float, end: float) -> Span:
    return Span(pool, name, step, T0 + start, T0 + end)


def events(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_busy_time_counts_simultaneous_work_once_and_only_inside_the_interval() -> None:
    spans = [span("a", "x", 1, 0, 2), span("b", "y", 1, 1, 3), span("b", "y", 1, 5, 6), span("a", "x", 1, 1.2, 1.5)]
    assert busy_s(spans, T0 + 0.5, T0 + 5.5) == 3.0
    assert busy_s([], T0, T0 + 1) == 0.0


def test_spans_are_joined_over_the_shortest_pauses() -> None:
    spans = [span("a", "x", 1, start, end) for start, end in ((0, 1), (2, 3), (3.5, 4), (9, 10), (10.75, 11))]
    at = [span("a", "x", 1, start, end) for start, end in ((0, 1), (2, 4), (9, 11))]
    assert joined(spans, 5) == spans
    assert joined(spans, 3) == at
    assert joined(spans, 1) == [span("a", "x", 1, 0, 11)]
    assert joined([], 3) == []


def test_the_file_is_valid_json_after_every_addition(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    assert events(path) == []
    trace.add([span("actor", "gen", 1, 0.0, 0.25), span("critic", "values", 1, 0.25, 0.5)])
    trace.add([])
    trace.add([span("actor", "update", 1, 0.5, 0.75)])
    first = events(path)[0]
    assert (first["name"], first["ts"], first["dur"], first["args"]) == ("gen", T0 * 1e6, 250_000.0, {"step": 1})
    assert [event["name"] for event in events(path)] == ["gen", "values", "update"]
    assert [s.name for s in read_trace(path)] == ["gen", "values", "update"]


def test_the_rows_of_each_part_are_kept_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    Trace(path).add([replace(span("actor", "gen", 1, 0.0, 0.25), parts=[[0, 3], [1, 2]])])
    assert events(path)[0]["args"] == {"step": 1, "parts": [[0, 3], [1, 2]]}
    Trace(path, read_trace(path))
    assert read_trace(path)[0].parts == [[0, 3], [1, 2]]
    assert events(path)[0]["args"]["parts"] == [[0, 3], [1, 2]]


def test_every_pool_is_a_named_process(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace.add([span("critic", "values", 1, 0, 1)])
    content = json.loads((tmp_path / "trace.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in content if event["name"] == "process_name"}
    assert list(names.values()) == [*("actor", "critic", "rollout", "controller", "scoring", "reward", "environments")]
    assert names[events(tmp_path / "trace.json")[0]["pid"]] == "critic"


def test_work_of_one_pool_at_the_same_time_lies_on_different_lines(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace.add([span("reward", "r", 1, 0, 2), span("reward", "r", 1, 1, 3), span("reward", "r", 1, 2, 4)])
    assert [event["tid"] for event in events(tmp_path / "trace.json")] == [1, 2, 1]


def test_work_that_is_told_late_lies_where_the_line_was_free(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace.add([span("actor", "save_checkpoint", 1, 3, 4)])
    trace.add([span("actor", "gen", 2, 1, 3), span("actor", "update_actor", 2, 4, 5), span("actor", "ref", 2, 3, 4)])
    assert [event["tid"] for event in events(tmp_path / "trace.json")] == [1, 1, 1, 2]


def test_work_that_is_told_after_hundreds_of_others_overlaps_none_on_its_line(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    for step in range(400):
        trace.add([span("actor", "gen", step, 2.0 * step, 2.0 * step + 1.0)])
    trace.add([span("actor", "save_checkpoint", 3, 6.5, 9.0), span("actor", "save_checkpoint", 390, 781.0, 782.0)])
    lines: dict[int, list[tuple[float, float]]] = {}
    for event in events(tmp_path / "trace.json"):
        lines.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert set(lines) == {1, 2}
    for line in lines.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(line)))


def test_a_write_that_a_kill_cuts_short_leaves_what_perfetto_reads(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    trace.add([span("actor", "gen", 1, 0.0, 0.25)])
    before = path.read_bytes()
    trace.add([span("actor", "gen", 2, 1.0, 1.25), span("critic", "values", 2, 1.0, 1.25)])
    after = path.read_bytes()
    for size in range(len(before), len(after) + 1):
        # An array's end is optional, and so is that of its last event (Trace Event Format, "JSON Array Format").
        whole_lines = after[:size].decode().rpartition("\n")[0].rstrip(",\n]")
        steps = [event["args"]["step"] for event in json.loads(f"{whole_lines}]") if event["ph"] == "X"]
        assert steps == [1, 2, 2][: len(steps)]
        assert steps


def test_a_resumed_run_keeps_earlier_steps_and_drops_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    first = Trace(path)
    first.add([span("actor", "gen", step, step, step + 0.5) for step in (1, 2, 3)])
    second = Trace(path, [one for one in read_trace(path) if one.step <= 2])
    second.add([span("actor", "gen", 3, 10, 11)])
    assert [(s.step, round(s.started_s - T0, 3)) for s in read_trace(path)] == [(1, 1), (2, 2), (3, 10)]
    Trace(path)
    assert events(path) == []


def test_a_file_torn_by_a_crash_gives_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    Trace(path).add([span("actor", "gen", step, step, step + 0.5) for step in (1, 2)])
    path.write_bytes(path.read_bytes()[:-20])
    Trace(path, read_trace(path)).add([span("actor", "gen", 2, 2, 3)])
    assert [event["args"]["step"] for event in events(path)] == [1, 2]


@pytest.mark.parametrize(
    "broken",
    [
        '{"ph": "X"}',
        '{"ph": "X", "cat": "actor", "name": "a", "ts": "1", "dur": 1, "args": {"step": 1}}',
        '{"ph": "X", "cat": "moon", "name": "a", "ts": 1, "dur": 1, "args": {"step": 1}}',
        '{"ph": "X", "cat": "actor", "name": "a", "ts": 1, "dur": 1, "args": null}',
        "[" * 100_000,
    ],
)
def test_a_line_that_holds_no_event_of_ours_is_left_out(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "trace.json"
    Trace(path).add([span("actor", "gen", 1, 1, 2)])
    path.write_text(path.read_text().replace("[\n", f"[\n{broken},\n", 1))
    Trace(path, read_trace(path)).add([span("actor", "gen", 2, 2, 3)])
    assert [event["args"]["step"] for event in events(path)] == [1, 2]
