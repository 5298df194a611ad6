"""How the policy's numbers spread: over all tokens by footers, over those of responses drawn at random by lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from splitppo.run_folder.files import RunDir
from tests.support.viewed_runs import Shape, add_step, make_run
from tests.support.viewer_client import ask
from viewer.distributions import MAX_STEPS, Distributions
from viewer.summaries import limits_of, recorded_histogram

pytestmark = pytest.mark.slow

SHAPE = Shape(steps=0, with_update=True)


async def columns_of(run: Path, query: str = "") -> Any:
    return (await ask([run], f"/api/runs/0/policy{query}")).json


async def test_kl_and_mismatch_count_all_tokens_and_entropy_and_ratio_those_drawn_at_random(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", SHAPE)
    rows = add_step(run, 1, SHAPE)
    [column] = (await columns_of(run))["columns"]
    lists: dict[str, Any] = {
        "kl": [(row["old"] - row["ref"])[row["flags"] > 0] for row in rows],
        "mismatch": [(row["old"] - row["rollout"])[row["flags"] > 0] for row in rows],
        "entropy": [row["entropy_tokens"][row["flags"] & 2 > 0] for row in rows if row["why"] & 1],
        "ratio": [np.exp(row["new"] - row["old"])[row["flags"] & 2 > 0] for row in rows if row["why"] & 1],
    }
    assert 0 < len(lists["entropy"]) < len(lists["kl"]) == len(rows)
    for name, parts in lists.items():
        values = np.concatenate(parts)
        edges, counts = (np.array(column[name][key]) for key in ("edges", "counts"))
        assert counts.sum() == len(values)
        assert [edges[0], edges[-1]] == pytest.approx([values.min(), values.max()], rel=1e-4)
        wanted = np.histogram(values, [-np.inf, *edges[1:-1], np.inf])[0]
        assert np.abs(counts - wanted).max() <= 2, name  # edges are rounded
    positions = [value for value in column["mismatch_by_position"] if value is not None]
    assert min(positions) > 0


async def test_a_run_without_an_update_or_a_reference_has_no_such_columns(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=1))
    [column] = (await columns_of(run))["columns"]
    assert set(column) == {"step", "kl", "mismatch", "kl_by_position", "mismatch_by_position"}


def test_of_many_steps_some_are_there_and_what_a_page_has_stays_of_use(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=1, prompts=1, samples=1))
    first = run / "rollouts" / "train" / "1.parquet"
    distributions, known = Distributions(RunDir(run)), list[int]()
    for last in (7, MAX_STEPS, 2 * MAX_STEPS + 1, 2_000):
        for step in range(1, last + 1):
            if not first.with_name(f"{step}.parquet").exists():
                first.with_name(f"{step}.parquet").hardlink_to(first)
        found = distributions.since(known[-1] if known else -1)
        known = [step for step in known if step in found["steps"]] + [column["step"] for column in found["columns"]]
        assert known == found["steps"]
        assert len(known) <= MAX_STEPS
    assert known[:3] == [1, 9, 17]


@pytest.mark.parametrize(
    ("histograms", "limits"),
    [
        ([{"edges": [0, 1, 2], "counts": [50, 50]}, None, {"edges": [4, 5, 900], "counts": [99, 1]}], (0.02, 5)),
        ([{"edges": [3, 3], "counts": [9]}], (2.5, 3.5)),
        ([{"edges": [0, 1, 2, 3], "counts": [0, 4, 0]}], (1.01, 1.99)),
        ([{"edges": [-12, 0, 1, 90], "counts": [50, 40, 10], "quantiles": [-0.2, -0.1, 0, 1, 1.4]}], (-0.2, 1.4)),
        ([None], None),
    ],
)
def test_limits_are_percentiles_of_all_histograms_together(histograms: list[Any], limits: object) -> None:
    found = limits_of([recorded_histogram({"one": one}, "one") for one in histograms])
    assert found == (limits if limits is None else pytest.approx(limits))


async def test_limits_are_those_of_all_steps_up_to_the_last_one_that_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=5, prompts=2))
    first, second, whole = [(await columns_of(run, query))["limits"] for query in ("?most=2", "?since=2", "")]
    assert second == whole != first
    assert set(whole) == {"kl", "mismatch", "entropy", "ratio"}
    assert whole["ratio"] is None


async def test_columns_come_in_parts_if_they_are_asked_for_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=5, prompts=1, samples=1))
    found = await columns_of(run, "?since=1&most=2")
    assert found["steps"] == [1, 2, 3, 4, 5]
    assert [column["step"] for column in found["columns"]] == [2, 3]


def test_a_file_is_read_once_as_long_as_it_is_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=2))
    distributions = Distributions(RunDir(run))
    before = distributions.since()["columns"]
    add_step(run, 2, seed=2)
    after = distributions.since()["columns"]
    assert after[0]["kl"] is before[0]["kl"]
    assert after[1] != before[1]


async def test_a_torn_file_is_a_sentence_in_its_column(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=3))
    (run / "rollouts" / "train" / "2.parquet").write_bytes(b"PAR1")
    columns = (await columns_of(run))["columns"]
    assert ["error" in column for column in columns] == [False, True, False]
    assert "rollouts/train/2.parquet" in columns[1]["error"]


@pytest.mark.parametrize(
    "histogram",
    [
        None,
        [],
        {"edges": [0, 1]},
        {"edges": [0, 1], "counts": [1, 2]},
        {"edges": [1, 0], "counts": [1]},
        {"edges": [0, "b"], "counts": [1]},
        {"edges": [0, 1e999], "counts": [1]},
        {"edges": [0, 10**400], "counts": [1]},
        {"edges": [0, 1, 2], "counts": [-1, 2]},
        {"edges": [0, 1], "counts": [0]},
        {"edges": [[0], [1]], "counts": [[1]]},
        {"edges": list(range(1002)), "counts": [1] * 1001},
    ],
)
@pytest.mark.parametrize("lists", [[[1.0]], ["text"], [1], [["text"]], [[None]], [[1.0, 2.0]], [None]])
async def test_what_no_run_writes_is_left_out(tmp_path: Path, histogram: object, lists: list[Any]) -> None:
    run = make_run(tmp_path / "run", Shape(steps=1))
    table = {"row": [0], "why": [1], "flags": [[3]], "old": lists, "new": lists, "entropy_tokens": lists}
    footer = {"histograms": {"log_ratio_ref": histogram}, "by_position": {"kl": {"a": 1}}}
    whole = pa.table(table).replace_schema_metadata({b"splitppo": json.dumps(footer).encode()})
    pq.write_table(whole, run / "rollouts" / "train" / "1.parquet")
    [column] = (await columns_of(run))["columns"]
    assert set(column) == {"step"} | ({"entropy", "ratio"} if lists == [[1.0]] else set())


@pytest.mark.parametrize("why", [[None], ["text"], [1.5]])
async def test_rows_without_reasons_represent_nothing(tmp_path: Path, why: list[Any]) -> None:
    run = make_run(tmp_path / "run", Shape(steps=1))
    table = {"row": [0], "why": why, "flags": [[3]], "old": [[1.0]], "new": [[1.0]]}
    pq.write_table(pa.table(table), run / "rollouts" / "train" / "1.parquet")
    assert (await columns_of(run))["columns"] == [{"step": 1}]


def test_a_histogram_without_quantiles_gives_those_of_its_bins_and_none_beyond_the_inner_ones() -> None:
    found = recorded_histogram({"kl": {"edges": [-12.0, 0.0, 1.0, 2.0, 90.0], "counts": [5, 45, 45, 5]}}, "kl")
    assert found is not None
    assert found["quantiles"] == pytest.approx([0.0, 5 / 45, 1.0, 1 + 40 / 45, 2.0])
    exact = {"edges": [0.0, 4.0], "counts": [3], "quantiles": [1, 2, 3, 4, 5]}
    assert recorded_histogram({"kl": exact}, "kl") == exact
