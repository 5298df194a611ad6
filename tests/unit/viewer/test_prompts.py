"""The fixed prompts of validations: their answers from step to step, and files that are broken or too many."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.viewer_client import ask
from viewer.comparison.prompts import MAX_CHARACTERS, MAX_VALIDATIONS


def validate(folder: Path, step: int, **changes: Any) -> Path:
    """Writes a validation of two fixed prompts with two samples each, and of one that is not fixed."""
    rows = [
        {
            "row": row,
            "prompt_index": 7 + row // 2,
            "sample": row % 2,
            "data_source": "letters",
            "place": f"val.jsonl, row {8 + row // 2}",
            "score": row / 4,
            "has_eos": True,
            "length": 3,
            "fixed": row < 4,
            **{name: None if row >= 4 else text for name, text in texts(step, row).items()},
            **changes,
        }
        for row in range(5)
    ]
    file = folder / "rollouts" / "val" / f"{step}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def texts(step: int, row: int) -> dict[str, str]:
    return {"prompt": f"sort {row // 2}" + "é" * 300, "response": f"answer {step} {row}", "ground_truth": "abc"}


async def answer(folder: Path, path: str) -> Any:
    return (await ask([folder], f"/api/runs/0{path}")).json


async def test_the_prompts_are_those_of_the_last_validation(tmp_path: Path) -> None:
    validate(tmp_path, 4)
    validate(tmp_path, 8)
    found = await answer(tmp_path, "/prompts")
    assert (found["step"], found["errors"]) == (8, [])
    assert [prompt["prompt_index"] for prompt in found["prompts"]] == [7, 8]
    first, second = found["prompts"]
    assert (first["begin"], first["place"]) == (("sort 0" + "é" * 300)[:200], "val.jsonl, row 8")
    assert first["hash"] != second["hash"]


async def test_a_prompt_has_all_its_answers_the_newest_first(tmp_path: Path) -> None:
    for step in (0, 4, 8):
        validate(tmp_path, step)
    found = await answer(tmp_path, "/prompts/8")
    assert (found["prompt"], found["ground_truth"], found["num_left_out"]) == ("sort 1" + "é" * 300, "abc", 0)
    told = [(row["step"], row["sample"], row["row"], row["response"], row["score"]) for row in found["rows"]]
    assert told == [(step, row - 2, row, f"answer {step} {row}", row / 4) for step in (8, 4, 0) for row in (2, 3)]


async def test_a_prompt_that_is_not_fixed_is_a_sentence(tmp_path: Path) -> None:
    validate(tmp_path, 4)
    for prompt in (9, 3, 10**30):
        found = await ask([tmp_path], f"/api/runs/0/prompts/{prompt}")
        assert (found.status, f"No validation has a fixed prompt {prompt}." in found.json["error"]) == (422, True)


async def test_torn_files_are_told_and_the_others_are_shown(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        file = validate(tmp_path, step)
        if step > 4:
            file.write_bytes(file.read_bytes()[:300])
    found = await answer(tmp_path, "/prompts")
    assert (found["step"], len(found["prompts"]), len(found["errors"])) == (4, 2, 2)
    found = await answer(tmp_path, "/prompts/7")
    assert [row["step"] for row in found["rows"]] == [4, 4]
    assert ["12.parquet" in text for text in found["errors"]] == [True, False]


async def test_a_run_without_a_record_of_validations_has_no_prompts(tmp_path: Path) -> None:
    assert await answer(tmp_path, "/prompts") == {"step": None, "prompts": [], "errors": []}


async def test_of_many_validations_these_are_spread_and_the_newest_and_the_first_are_there(tmp_path: Path) -> None:
    first = validate(tmp_path, 0)
    for step in range(1, 2 * MAX_VALIDATIONS + 1):
        os.link(first, first.with_name(f"{step}.parquet"))
    found = await answer(tmp_path, "/prompts/7")
    steps = [row["step"] for row in found["rows"]][::2]
    assert (len(steps), steps[0], steps[-1]) == (MAX_VALIDATIONS, 2 * MAX_VALIDATIONS, 0)
    assert found["num_left_out"] == MAX_VALIDATIONS + 1
    assert {one - other for one, other in pairwise(steps)} <= {2, 3}


async def test_texts_are_limited_together_and_the_oldest_are_cut(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        validate(tmp_path, step, response="x" * (MAX_CHARACTERS // 4))
    rows = (await answer(tmp_path, "/prompts/7"))["rows"]
    assert sum(len(row["response"]) for row in rows) <= MAX_CHARACTERS
    assert [row["is_cut"] for row in rows] == [False, False, False, True, True, True]
    assert rows[-1]["score"] is not None


@pytest.mark.parametrize("value", ["text", b"\xff", 7, 2**62, 0.5, True, ["x"], [None], {"a": 1}, None])
async def test_columns_of_any_type_end_no_answer(tmp_path: Path, value: object) -> None:
    names = ("prompt_index", "sample", "score", "fixed", "prompt", "response", "place", "data_source", "row", "length")
    for name in names:
        validate(tmp_path, 4, **{name: value})
        for path in ("/prompts", "/prompts/7"):
            assert (await ask([tmp_path], f"/api/runs/0{path}")).status in (200, 422), name
