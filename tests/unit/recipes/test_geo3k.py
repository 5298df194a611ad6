"""Geometry3K: rows with their figures, from parquet and JSONL files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.geo3k.prepare import main, to_row
from recipes.rows import BadInput, Example
from rewards.scorers.geo3k import compute_score
from tests.support.vision_models import draw_image

FIGURE = {"bytes": draw_image(0, 40, 30), "path": None}
EXAMPLE: dict[str, Any] = {"problem": "<image>Find x.", "answer": "2 \\sqrt { 221 }", "images": [FIGURE]}


def test_a_row_has_verls_schema_and_its_images_as_they_are() -> None:
    asked = (
        "<image>Find x. You FIRST think about the reasoning process as an internal monologue and then provide the final"
        " answer. The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in"
        " \\boxed{}."
    )
    assert to_row(Example("here", EXAMPLE, "test", 7)) == {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": asked}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2 \\sqrt { 221 }"},
        "extra_info": {"split": "test", "index": 7, "answer": "2 \\sqrt { 221 }", "question": "<image>Find x."},
        "images": [FIGURE],
    }


def test_the_right_answer_in_the_form_that_is_asked_for_gets_the_whole_reward() -> None:
    truth = to_row(Example("here", EXAMPLE))["reward_model"]["ground_truth"]
    answer = "<think>By Pythagoras.</think> It is \\boxed{2\\sqrt{221}}."
    assert compute_score("hiyouga/geometry3k", answer, truth)["score"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"images": None}, "here: the problem has 1 <image>, 'images' has 0"),
        ({"images": [FIGURE, FIGURE]}, "here: the problem has 1 <image>, 'images' has 2"),
        ({"problem": "Find x."}, "here: the problem has 0 <image>, 'images' has 1"),
        ({"answer": None}, "here: expected a text under 'answer', got None"),
    ],
)
def test_a_row_that_lacks_something_is_one_sentence(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput) as caught:
        to_row(Example("here", {**EXAMPLE, **fields}))
    assert str(caught.value) == told


def test_the_files_of_the_hub_become_prompt_files_with_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist([EXAMPLE] * 3), tmp_path / f"data/{split}-00000-of-00001.parquet")
    output = tmp_path / "out"
    assert main(["--input", str(tmp_path), "--output", str(output)]) == 0
    for split in ("train", "test"):
        rows = pq.read_table(output / f"{split}.parquet").to_pylist()
        assert [row["images"] for row in rows] == [[FIGURE]] * 3
    assert f"images[0].bytes: {len(FIGURE['bytes'])} bytes\n" in capsys.readouterr().out


def test_images_that_are_paths_stay_paths(tmp_path: Path) -> None:
    lines = [json.dumps({**EXAMPLE, "images": ["figures/1.png"]})] * 3
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    assert main(["--input", str(tmp_path / "rows.jsonl"), "--test-rows", "1", "--output", str(tmp_path)]) == 0
    assert [row["images"] for row in pq.read_table(tmp_path / "train.parquet").to_pylist()] == [["figures/1.png"]] * 2
