"""Fixtures for the tests of prepare.py: input files, and the files that it wrote, read back."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.datasets import real_rows

Prepare = Callable[..., dict[str, list[dict[str, Any]]]]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Sequence[Any]], Path]:
    """Writes a JSONL file; a line that is a string stands as it is."""

    def write_lines(name: str, lines: Sequence[Any]) -> Path:
        file = tmp_path / name
        file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return file

    return write_lines


@pytest.fixture
def prepare_real(tmp_path: Path) -> Prepare:
    """Prepares a recipe's real rows, without models; gives the rows of both splits, and skips where there are none."""

    def prepare(recipe: str, *more: str) -> dict[str, list[dict[str, Any]]]:
        output = tmp_path / recipe
        arguments = [*real_rows(recipe), "--output", str(output), "--no-tiny-model", *more]
        assert importlib.import_module(f"recipes.{recipe}.prepare").main(arguments) == 0
        return {split: pq.read_table(output / f"{split}.parquet").to_pylist() for split in ("train", "test")}

    return prepare


@pytest.fixture
def version_of() -> Callable[[Path], tuple[int, int]]:
    """Returns which file lies at a path and when it was written; reading it makes no other version."""

    def version(file: Path) -> tuple[int, int]:
        return file.stat().st_ino, file.stat().st_mtime_ns

    return version


@pytest.fixture
def check_schema() -> Callable[[dict[str, list[dict[str, Any]]]], None]:
    """Checks that the rows of both splits are verl's prompt rows, in their order; a failure shows no text."""

    def check(splits: dict[str, list[dict[str, Any]]]) -> None:
        for split, rows in splits.items():
            assert [number for number, row in enumerate(rows) if not _is_prompt_row(row, split)] == []
            indices = [row["extra_info"]["index"] for row in rows]
            assert indices == sorted(set(indices))

    return check


def _is_prompt_row(row: dict[str, Any], split: str) -> bool:
    roles = [message["role"] for message in row["prompt"]]
    return (
        list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
        and {"style", "ground_truth"} <= row["reward_model"].keys()
        and row["extra_info"]["split"] == split
        and roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        and all(message["content"].strip() for message in row["prompt"])
    )
