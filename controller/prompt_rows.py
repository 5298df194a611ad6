"""Rows of prompt files, parquet or JSONL: read as they are, checked, every mistake named by file, row and column."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitppo.config import ConfigError


@dataclass(frozen=True)
class PromptRow:
    """One row of a data file, checked."""

    prompt: str | list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def read_rows(
    files: Sequence[str], *, key: str, prompt_key: str, max_samples: int | None
) -> tuple[list[str], list[PromptRow]]:
    """Checked rows of all files and the place of each, e.g. "train.parquet, row 3" (from 1), for errors."""
    places: list[str] = []
    rows: list[PromptRow] = []
    for name in files:
        file = Path(name).expanduser()
        if not file.is_file():
            raise ConfigError(f"{key}: no such file {file}")
        left = None if max_samples is None else max_samples - len(rows)
        if left == 0:
            break
        before = len(rows)
        for place, content in _file_rows(file, prompt_key, left):
            rows.append(_checked(content, place, prompt_key))
            places.append(place)
        if len(rows) == before:
            raise ConfigError(f"{key}: {file} has no rows")
    return places, rows


def _file_rows(file: Path, prompt_key: str, limit: int | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """At most `limit` rows of a file, each with its place."""
    if file.suffix == ".parquet":
        rows = _parquet_rows(file, prompt_key)
    elif file.suffix in {".jsonl", ".json"}:
        rows = _jsonl_rows(file)
    else:
        raise ConfigError(f"{file}: expected a .parquet or .jsonl file")
    for count, row in enumerate(rows):
        if count == limit:
            return
        yield row


def _parquet_rows(file: Path, prompt_key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow.parquet as pq  # slow to import, and JSONL does not need it
    from pyarrow import ArrowException

    number = 0
    try:
        with pq.ParquetFile(file) as table:
            wanted = [prompt_key, "data_source", "reward_model", "extra_info"]
            columns = [name for name in wanted if name in table.schema_arrow.names]
            for batch in table.iter_batches(batch_size=4096, columns=columns):
                for content in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", content
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{file} is not a readable parquet file: {error}") from error


def _jsonl_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                place = f"{file}, line {number}"
                try:
                    content = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{place}: not valid JSON: {error}") from error
                if not isinstance(content, dict):
                    raise ConfigError(f"{place}: expected a JSON object, got {type(content).__name__}")
                yield place, content
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error}") from error


def _checked(content: Mapping[str, Any], place: str, prompt_key: str) -> PromptRow:
    """The row, if its columns are there and of the right types."""

    def column(name: str, expected: type | tuple[type, ...], words: str) -> Any:
        if name not in content:
            raise ConfigError(f"{place}: column {name!r} is missing; the row has {', '.join(content) or 'none'}")
        if not isinstance(content[name], expected):
            raise ConfigError(f"{place}: column {name!r} must be {words}, got {_shown(content[name])}")
        return content[name]

    reward_model = column("reward_model", dict, "a mapping with 'ground_truth'")
    if "ground_truth" not in reward_model and reward_model.get("style") != "model":
        raise ConfigError(f"{place}: column 'reward_model' has no 'ground_truth', got {_shown(reward_model)}")
    extra_info = content.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise ConfigError(f"{place}: column 'extra_info' must be a mapping, got {_shown(extra_info)}")
    return PromptRow(
        prompt=column(prompt_key, (str, list), "chat messages or text"),
        data_source=column("data_source", str, "text"),
        ground_truth=reward_model.get("ground_truth"),
        extra_info=extra_info or {},
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
