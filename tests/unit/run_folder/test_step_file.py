"""Files with one line per step, cut back at a resume, and the files of rollouts."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from splitppo.config import ConfigError
from splitppo.run_folder.rollout_lines import cut_back, write_rollouts
from splitppo.run_folder.step_file import StepFile, follow_steps, read_metrics


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_one_line_of_plain_json(tmp_path: Path) -> None:
    file = StepFile(tmp_path / "metrics.jsonl")
    file.write(0, {"val-core/x/acc/mean@1": 0.25})
    file.write(1, {"a": math.nan, "b": -math.inf, "c": np.float32(0.5), "d": np.int64(3), "e": 2})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 0, "val-core/x/acc/mean@1": 0.25},
        {"step": 1, "a": None, "b": None, "c": 0.5, "d": 3, "e": 2},
    ]
    assert '"e": 2}' in (tmp_path / "metrics.jsonl").read_text()


def test_a_step_cannot_be_logged_twice(tmp_path: Path) -> None:
    file = StepFile(tmp_path / "metrics.jsonl")
    file.write(2, {})
    with pytest.raises(ValueError, match=r"metrics.jsonl: step 2 comes after step 2"):
        file.write(2, {})


def test_a_resumed_run_continues_without_gap_or_double(tmp_path: Path) -> None:
    first = StepFile(tmp_path / "metrics.jsonl", -1)
    for step in range(6):
        first.write(step, {"a": step})
    second = StepFile(tmp_path / "metrics.jsonl", 3)
    for step in (4, 5, 6):
        second.write(step, {"a": 10 * step})
    assert [(row["step"], row["a"]) for row in lines(tmp_path / "metrics.jsonl")] == [
        (0, 0), (1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60)
    ]  # fmt: skip


def test_a_run_restored_to_the_initial_models_keeps_their_validation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "v": 1}\n{"step": 1}\n')
    StepFile(path, 0)
    assert lines(path) == [{"step": 0, "v": 1}]


@pytest.mark.parametrize("torn", ['{"step": 3, "a": 0.', '{"step": 3}', "\x00\x00\x00"])
def test_a_torn_last_line_is_removed(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    StepFile(path).write(3, {"a": 1})
    assert [row["step"] for row in lines(path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ('{"step": 2, "a": 0.', "not valid JSON: "),
        ("[2]", "expected a JSON object, got list"),
        ('{"a": 2}', "expected an integer under step, got None"),
        ('{"step": 1}', "expected a step after 1, got 1"),
    ],
)
def test_a_broken_line_in_the_middle_is_named_and_no_line_after_it_is_lost(
    tmp_path: Path, broken: str, reason: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{broken}\n{{"step": 3}}\n')
    before = path.read_bytes()
    for read in (read_metrics, StepFile):
        with pytest.raises(
            ConfigError, match=rf"metrics\.jsonl, line 2: {reason}.*; mend or remove this line"
        ) as named:
            read(path)
        assert "\n" not in str(named.value)
    assert path.read_bytes() == before


def test_a_fresh_run_starts_with_empty_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    StepFile(tmp_path / "metrics.jsonl", -1)
    assert lines(tmp_path / "metrics.jsonl") == []


def test_rollouts_are_dumped_per_step_and_cut_back(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_rollouts(
            tmp_path / "train", step, [{"prompt": "é\n", "score": np.float64(math.nan), "ids": np.arange(2)}]
        )
    write_rollouts(tmp_path / "val", 3, [])
    cut_back(tmp_path, 2)
    assert sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.jsonl")) == [
        "train/1.jsonl",
        "train/2.jsonl",
    ]
    assert lines(tmp_path / "train" / "1.jsonl") == [{"prompt": "é\n", "score": None, "ids": [0, 1]}]


def test_a_pipe_in_the_place_of_the_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    for read in (StepFile, read_metrics):
        with pytest.raises(ConfigError, match=r"metrics\.jsonl: expected a file, got a pipe$"):
            read(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: expected a file"):
        follow_steps(tmp_path / "metrics.jsonl").read()
