"""Run folders that are broken, old, hostile, or written while they are read."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from splitppo.run_folder import files, rollouts
from splitppo.run_folder.files import RunDir, Unreadable, finite
from tests.support.viewed_runs import Shape, add_step, go_back, make_run, write_live
from tests.support.viewer_client import TOKEN, Answer, ask, send_to
from viewer.__main__ import main
from viewer.app import make_app
from viewer.run import Run, find_runs

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", Shape(steps=3, prompts=2, samples=2))


def test_runs_are_found_in_a_folder_of_runs(run: Path) -> None:
    (run.parent / "no run").mkdir()
    assert find_runs([run.parent]) == find_runs([run]) == find_runs([run, run.parent]) == [run]


async def test_a_run_that_was_removed_is_told_so_and_keeps_its_number(run: Path) -> None:
    other = make_run(run.parent / "other", Shape(steps=1, prompts=1, samples=1))
    shutil.rmtree(run)
    lines = json.loads((await ask([run, other], "/api/runs")).content)["runs"]
    assert [(line["number"], line["is_removed"]) for line in lines] == [(0, True), (1, False)]
    assert "cannot be read" in lines[0]["error"]


async def test_why_a_run_failed_is_among_its_facts_without_secrets(run: Path) -> None:
    why = "data.train_files: no such file none.jsonl, password=hunter22hunter22"
    (run / "summary.json").write_text(json.dumps({"exit_reason": "bad_input", "why": why}))
    facts = json.loads((await ask([run], "/api/runs/0")).content)
    assert facts["why"] == "data.train_files: no such file none.jsonl, password=(hidden)"
    (run / "summary.json").write_text(json.dumps({"exit_reason": "failed"}))
    assert json.loads((await ask([run], "/api/runs/0")).content)["why"] is None


async def test_a_link_in_a_run_is_not_followed(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"exit_reason": "secret"}')
    for name in ("summary.json", "live.json", "rollouts/train/1.parquet"):
        (run / name).unlink()
        (run / name).symlink_to(secret)
    assert b"secret" not in (await ask([run], "/api/runs/0")).content.replace(b"secret/", b"")
    assert (await ask([run], "/api/runs/0/train/1")).status == 422


async def test_a_folder_that_is_a_link_is_not_followed(run: Path, tmp_path: Path) -> None:
    (run / "rollouts" / "train").rename(tmp_path / "elsewhere")
    (run / "rollouts" / "train").symlink_to(tmp_path / "elsewhere")
    answer = await ask([run], "/api/runs/0/train/1")
    assert answer.status == 422


def test_a_pipe_does_not_hold_the_viewer(run: Path) -> None:
    (run / "live.json").unlink()
    os.mkfifo(run / "live.json")
    with pytest.raises(Unreadable, match="no plain file"):
        RunDir(run).json("live.json")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 100 + b"PAR1", os.urandom(2000)])
async def test_a_torn_parquet_is_a_sentence_and_the_rest_works(run: Path, content: bytes) -> None:
    (run / "rollouts" / "train" / "2.parquet").write_bytes(content)
    answer = await ask([run], "/api/runs/0/train/2")
    assert answer.status == 422
    assert "rollouts/train/2.parquet" in answer.json["error"]
    critic = (await ask([run], "/api/runs/0/recorded")).json
    assert critic["steps"] == [1, 2, 3]
    assert [value is None for value in critic["value"]] == [False, True, False]
    assert len(critic["errors"]) == 1


async def test_a_parquet_cut_at_any_length_is_a_sentence(run: Path) -> None:
    file = run / "rollouts" / "train" / "1.parquet"
    whole = file.read_bytes()
    for share in range(1, 10):
        file.write_bytes(whole[: len(whole) * share // 10])
        assert (await ask([run], "/api/runs/0/train/1")).status == 422


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "trace.json", "config.yaml", "summary.json"])
async def test_a_pipe_in_place_of_a_file_is_not_waited_for(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for path in ("/api/runs", "/api/runs/0", "/api/runs/0/config", "/api/runs/0/timeline"):
        assert (await ask([run], path)).status in (200, 422)


def test_of_very_many_lines_the_first_are_taken_and_the_others_counted(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LINES", 2)
    viewed = Run(0, run)
    viewed.refresh()
    with (run / "events.jsonl").open("a") as file:
        file.write('{"kind": "one"}\n' * 5)
    viewed.refresh()
    assert viewed.metrics.steps == [1, 2]
    assert viewed.metrics.lines_broken == 1
    assert [event["number"] for event in viewed.events] == [*range(2)]


async def test_a_text_that_is_stored_once_for_many_rows_is_not_unfolded_beyond_the_limit(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "MAX_TABLE_BYTES", 1 << 24)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 256, pa.int32()), pa.array(["x" * (1 << 22)]))  # 1 GiB
    file = run / "rollouts" / "train" / "1.parquet"
    pq.write_table(pa.table({"row": range(256), "data_source": texts}), file, compression="zstd", store_schema=False)
    answer = await ask([run], "/api/runs/0/train/1")
    assert answer.status == 422
    assert "unfolds to" in answer.json["error"]
    assert pa.default_memory_pool().max_memory() < 1 << 29


@pytest.mark.parametrize("limit", ["MAX_VALUES", "MAX_READ_VALUES"])
async def test_a_list_with_more_values_than_a_page_may_get_is_a_sentence(
    run: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(rollouts, limit, 10_000)
    pq.write_table(pa.table({"row": [0], "score": [np.zeros(10_000)]}), run / "rollouts" / "train" / "1.parquet")
    answer = await ask([run], "/api/runs/0/train/1")
    assert answer.status == 422
    assert re.search(r"10,00[12] values", answer.json["error"])


async def test_lists_that_do_not_fit_each_other_are_a_sentence(run: Path) -> None:
    table = {"row": [0], "prompt_index": [0], "why": [1], "ends": [[1, 2, 3]], "old": [[0.1]], "flags": [[3]]}
    pq.write_table(pa.table(table), run / "rollouts" / "train" / "1.parquet")
    answer = await ask([run], "/api/runs/0/train/1/0")
    assert answer.status == 422
    assert "differ in length" in answer.json["error"]


@pytest.mark.parametrize("name", ["old", "turn_ends", "segments"])
async def test_a_text_in_the_place_of_a_list_is_a_sentence(run: Path, name: str) -> None:
    table = {"row": [0], "why": [1], "flags": [[3]], "ends": [[1]], name: ["1, 2"]}
    pq.write_table(pa.table(table), run / "rollouts" / "train" / "1.parquet")
    answer = await ask([run], "/api/runs/0/train/1/0")
    assert answer.status == 422
    assert f"{name} is no list of numbers" in answer.json["error"]


async def test_a_row_that_is_not_there_is_a_sentence(run: Path) -> None:
    assert (await ask([run], "/api/runs/0/train/1/99")).status == 422


async def test_text_that_is_no_utf8_is_shown_as_far_as_it_is(run: Path) -> None:
    column = pa.array([b"a\xffb"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"row": [0], "response": column}), run / "rollouts" / "train" / "1.parquet")
    assert (await ask([run], "/api/runs/0/train/1/0")).json["row"]["response"] == "a\ufffdb"


async def test_numbers_that_are_not_finite_become_null(run: Path) -> None:
    numbers = {"row": [0], "score": [float("nan")], "value": [[float("inf"), 1.0]], "flags": [[3, 3]], "ends": [[1, 2]]}
    pq.write_table(pa.table(numbers), run / "rollouts" / "train" / "1.parquet")
    row = (await ask([run], "/api/runs/0/train/1/0")).json["row"]
    assert row["score"] is None
    assert row["value"] == [None, 1.0]


def test_what_is_no_finite_number_is_none() -> None:
    given = [1, 2.5, True, "3", None, [4], float("nan"), float("inf"), 10**400]
    assert [finite(value) for value in given] == [1.0, 2.5, *[None] * 7]


def test_half_a_line_waits_for_its_rest_and_a_broken_line_is_counted(run: Path) -> None:
    viewed = Run(0, run)
    viewed.refresh()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"step": 4, "critic/score/mean": 0.')
        file.flush()
        viewed.refresh()
        assert viewed.metrics.steps == [1, 2, 3]
        file.write("25}\n")
    viewed.refresh()
    assert viewed.metrics.steps == [1, 2, 3, 4]
    assert viewed.metrics.recent("critic/score/mean") == [0.25]
    assert viewed.metrics.lines_broken == 1


def test_a_run_that_goes_back_is_read_anew(run: Path) -> None:
    viewed = Run(0, run)
    viewed.refresh()
    before = viewed.metrics.generation
    go_back(run, 1)
    add_step(run, 2, Shape(prompts=2, samples=2), seed=9)
    viewed.refresh()
    assert viewed.metrics.steps == [1, 2]
    assert viewed.metrics.generation != before
    assert viewed.folder.steps("train") == [1, 2]


def test_a_run_that_is_deleted_while_it_is_watched_is_a_sentence(run: Path) -> None:
    viewed = Run(0, run)
    viewed.refresh()
    run.rename(run.with_name("gone"))
    assert "cannot be read" in viewed.overview()["error"]
    assert viewed.metrics.steps == []


def test_the_state_of_a_run_is_told_by_its_heartbeat_and_its_process(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=1), ended=False)
    viewed = Run(0, run)
    assert viewed.state()["state"] == "live"
    write_live(run, step=1, total=2, phase="training", age_s=42)
    assert viewed.state()["state"] == "quiet"
    assert viewed.state()["sentence"].startswith("quiet for 4")
    write_live(run, step=1, total=2, phase="training", pid=2**22 + 1)
    assert viewed.state()["state"] == "gone"
    write_live(run, step=1, total=2, phase="training", pid_started=1)
    assert viewed.state()["state"] == "gone"
    write_live(run, step=1, total=2, phase="training", pid=2**22 + 1, host="another")
    assert viewed.state()["state"] == "live"
    (run / "summary.json").write_text('{"exit_reason": "failed"}')
    write_live(run, step=1, total=2, phase="ended")
    assert (viewed.state()["state"], viewed.state()["sentence"]) == ("ended", "failed")


async def test_a_folder_of_a_run_before_the_record_is_shown(tmp_path: Path) -> None:
    run = tmp_path / "old"
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "critic/score/mean": 0.5}\n{"step": 2, "critic/score/mean": null}\n'
    )
    (run / "summary.json").write_text('{"exit_reason": "completed"}')
    facts = (await ask([run], "/api/runs/0")).json
    assert (facts["state"], facts["train"], facts["has_events"]) == ("ended", [], False)
    answer = await ask([run], "/api/runs/0/columns?metrics=0")
    words = np.frombuffer(answer.content, "<i4")
    assert words[:3].tolist() == [2, 1, 2]
    scores = np.frombuffer(answer.content, "<f4")[3:]
    assert scores[0] == 0.5
    assert np.isnan(scores[1])


async def test_columns_begin_after_the_steps_that_the_page_has(run: Path) -> None:
    words = np.frombuffer((await ask([run], "/api/runs/0/columns?metrics=0,1&since=1")).content, "<i4")
    assert words[:3].tolist() == [2, 2, 3]
    assert len(words) == 3 + 2 * 2


@pytest.mark.parametrize("asked", ["99999", "x", "0,-1"])
async def test_a_metric_that_is_not_there_is_a_sentence(run: Path, asked: str) -> None:
    assert (await ask([run], f"/api/runs/0/columns?metrics={asked}")).status == 422


async def test_nothing_in_the_folder_is_changed(run: Path) -> None:
    def facts() -> dict[str, tuple[int, int]]:
        return {str(file): (file.stat().st_mtime_ns, file.stat().st_size) for file in [run, *run.rglob("*")]}

    before = facts()
    for path in ("/api/runs", "/api/runs/0", "/api/runs/0/recorded", "/api/runs/0/train/1", "/api/runs/0/train/1/0"):
        assert (await ask([run], path)).status == 200
    assert facts() == before


async def test_metrics_have_the_meaning_of_the_table_that_declares_them(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "val-core/gsm8k/reward/mean@1": 1.0, "something/else": 1.0}) + "\n")
    told = {row[0]: row[1:] for row in (await ask([run], "/api/runs/0")).json["metrics"]}
    meaning = "score of a response, as it was given, that of its tokens included"
    assert told["critic/score/mean"] == ["Rewards, advantages, values", "1", meaning]
    assert told["val-core/gsm8k/reward/mean@1"][0] == "Run and validation"
    assert told["something/else"] == ["", "", ""]


async def test_a_line_with_a_hostile_name_is_a_name(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "</script><script>alert(1)</script>": 1.0, "x" * 5000: 1.0}) + "\n")
    names = [row[0] for row in (await ask([run], "/api/runs/0")).json["metrics"]]
    assert "</script><script>alert(1)</script>" in names
    assert not any(len(name) > 200 for name in names)


GARBAGE = [None, True, -1, 10**400, 1e308, "text", [], [1, 2], {"a": 1}, [[1], {}], {"edges": 5, "counts": "x"}]


@pytest.mark.parametrize("value", GARBAGE, ids=lambda value: str(value)[:20])
async def test_values_of_any_kind_end_no_answer(run: Path, value: object) -> None:
    keys = ("histograms", "by_position", "calibration", "explained_variance", "auc_first_value", "gamma", "clip_low")
    inner = {"histograms": dict.fromkeys(("value", "ret", "advantage", "log_ratio_ref"), value)}
    table = pq.read_table(run / "rollouts" / "train" / "1.parquet")
    for footer in (dict.fromkeys(keys, value), inner, {"by_position": {"ev": value}}, value):
        metadata = {b"splitppo": json.dumps(footer).encode()}
        pq.write_table(table.replace_schema_metadata(metadata), run / "rollouts" / "train" / "1.parquet")
        line = json.dumps(dict.fromkeys(("step", "critic/score/mean", "unix_s", "kind", "spans"), value))
        for name in ("metrics.jsonl", "events.jsonl"):
            with (run / name).open("a") as file:
                file.write(line + "\n")
        live = ("unix_s", "pid", "pid_started", "host", "phase", "pools", "step", "total_steps")
        (run / "live.json").write_text(json.dumps(dict.fromkeys(live, value)))
        (run / "summary.json").write_text(json.dumps({"exit_reason": value}))
        for path in ("", "/recorded", "/train/1", "/train/1/0", "/columns?metrics=0,1"):
            assert (await ask([run], f"/api/runs/0{path}")).status in (200, 422), path


@pytest.mark.parametrize("value", ["text", b"\xff", 7, -7, 2**62, 0.5, True, ["x"], [1], [None], [[1]], {"a": 1}, None])
async def test_columns_of_any_type_end_no_answer(run: Path, value: object) -> None:
    file = run / "rollouts" / "train" / "1.parquet"
    whole = pq.read_table(file)
    for name in ("score", "why", "extra", "prompt", "flags", "ends", "value", "old", "text_hash", "turn"):
        column = pa.array([value] * whole.num_rows)
        pq.write_table(whole.set_column(whole.column_names.index(name), name, column), file)
        for path in ("", "/0"):
            assert (await ask([run], f"/api/runs/0/train/1{path}")).status in (200, 422), name


async def test_a_text_is_found_in_what_is_recorded_of_a_response(run: Path) -> None:
    rows = pq.read_table(run / "rollouts" / "train" / "1.parquet").to_pylist()
    [*_, wanted] = [row for row in rows if row["response"]]
    part = wanted["response"][3:15]
    for text in (part.upper(), part.lower()):
        found = (await ask([run], f"/api/runs/0/train/1?text={quote(text)}")).json["columns"]["found"]
        assert found == [part.casefold() in (row["response"] or "").casefold() for row in rows]
        assert any(found)
    assert not any((await ask([run], f"/api/runs/0/train/1?text={quote('.*')}")).json["columns"]["found"])


async def test_a_run_with_a_value_that_is_nested_deeply_takes_no_other_run_away(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", Shape(steps=1))
    for depth in (10, 100, *range(800, 1000, 20)):  # somewhere there, JSON could be read, but not written again
        (other / "live.json").write_text('{"phase": ' + '{"a": ' * depth + "1" + "}" * (depth + 1))
        first, second = (await ask([run, other], "/api/runs")).json["runs"]
        assert (first["step"], second["name"]) == (3, "other")
        assert (await ask([run, other], "/api/runs/1")).status in (200, 422)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1] * 4, pa.timestamp("s")),
        pa.array([{"a": b"x"}] * 4),
        pa.array([1] * 4, pa.decimal128(5)),
        pa.DictionaryArray.from_arrays(pa.array([0] * 4, pa.int32()), pa.array(["stored once"])),
        pa.array([["x"]] * 4),
        pa.array([[[1]]] * 4),
    ],
    ids=str,
)
async def test_a_column_of_a_type_that_no_run_writes_is_a_sentence(run: Path, column: object) -> None:
    file = run / "rollouts" / "train" / "1.parquet"
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.column_names.index("score"), "score", column), file)
    for address in ("/api/runs/0/train/1", "/api/runs/0/train/1/0"):
        answer = await ask([run], address)
        assert (answer.status, "what no run writes" in answer.json["error"]) == (422, True)


async def test_a_file_without_rows_numbers_is_a_sentence(run: Path) -> None:
    pq.write_table(pa.table({"score": [1.0]}), run / "rollouts" / "train" / "1.parquet")
    assert "has no column `row`" in (await ask([run], "/api/runs/0/train/1")).json["error"]


@pytest.mark.parametrize("port", [-1, 70_000, 10**20])
def test_a_port_that_is_none_is_one_sentence(run: Path, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--port", str(port)]) == 2
    assert f"error: --port {port}" in capsys.readouterr().err


def test_a_run_that_two_pages_find_at_once_joins_the_table_once(tmp_path: Path) -> None:
    first, later = (make_run(tmp_path / name, Shape(steps=1)) for name in ("first", "later"))
    both_look = threading.Barrier(2, timeout=30)

    def find() -> list[Path]:
        both_look.wait()
        return [first, later]

    async def asked_at_once() -> list[Answer]:
        app = make_app([Run(0, first)], token=TOKEN, find=find)
        return await asyncio.gather(send_to(app, "/api/runs"), send_to(app, "/api/runs"))

    for answer in asyncio.run(asked_at_once()):
        assert [run["name"] for run in answer.json["runs"]] == ["first", "later"]
