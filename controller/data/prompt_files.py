"""Rows of prompt files, parquet or JSONL: read as they are, checked, every mistake named by file, row and column."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from splitppo.config import ConfigError
from splitppo.jsonl import read_jsonl


@dataclass(frozen=True)
class PromptRow:
    """One row of a data file, checked.

    Attributes:
        place: e.g. "train.parquet, row 3" (from 1), for errors.
        prompt: chat messages, or text.
        data_source, ground_truth, extra_info: for the scorer.
    """

    place: str
    prompt: str | list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def read_rows(files: Sequence[str], *, key: str, prompt_key: str, max_samples: int | None) -> list[PromptRow]:
    """The first `max_samples` rows of all files, checked.

    Raises ConfigError: a file is missing, unreadable or empty, or a row has not the columns that it needs.
    """
    rows: list[PromptRow] = []
    for name in files:
        file = Path(name).expanduser()
        if not file.is_file():
            raise ConfigError(f"{key}: no such file {file}")
        if len(rows) == max_samples:
            break
        left = None if max_samples is None else max_samples - len(rows)
        own = [_checked(content, place, prompt_key) for place, content in islice(_file_rows(file, prompt_key), left)]
        if not own:
            raise ConfigError(f"{key}: {file} has no rows")
        rows += own
    return rows


def _file_rows(file: Path, prompt_key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if file.suffix == ".parquet":
        yield from _parquet_rows(file, prompt_key)
    elif file.suffix in {".jsonl", ".json"}:
        try:
            for number, content in read_jsonl(file):
                yield f"{file}, line {number}", content
        except ValueError as error:
            raise ConfigError(str(error)) from error
    else:
        raise ConfigError(f"{file}: expected a .parquet or .jsonl file")


def _parquet_rows(file: Path, prompt_key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow.parquet as pq  # slow to import, and JSONL does not need it
    from pyarrow import ArrowException

    try:
        with pq.ParquetFile(file) as table:
            wanted = [prompt_key, "data_source", "reward_model", "extra_info"]
            columns = [name for name in wanted if name in table.schema_arrow.names]
            batches = table.iter_batches(batch_size=4096, columns=columns)
            for number, content in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                yield f"{file}, row {number}", content
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{file} is not a readable parquet file: {error}") from error


def _checked(content: Mapping[str, Any], place: str, prompt_key: str) -> PromptRow:
    def column(name: str, expected: type | tuple[type, ...], words: str) -> Any:
        if name not in content:
            raise ConfigError(f"{place}: column {name!r} is missing; the row has {', '.join(content) or 'none'}")
        if not isinstance(content[name], expected):
            raise ConfigError(f"{place}: column {name!r} must be {words}, got {_shown(content[name])}")
        return content[name]

    reward_model = column("reward_model", dict, "a mapping with 'ground_truth'")
    if "ground_truth" not in reward_model and reward_model.get("style") != "model":
        raise ConfigError(f"{place}: column 'reward_model' has no 'ground_truth', got {_shown(reward_model)}")
    return PromptRow(
        place=place,
        prompt=column(prompt_key, (str, list), "chat messages or text"),
        data_source=column("data_source", str, "text"),
        ground_truth=reward_model.get("ground_truth"),
        extra_info=column("extra_info", dict, "a mapping") if content.get("extra_info") is not None else {},
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
