"""Reads rows of data sets from JSONL or parquet files, and writes prompt files in verl's schema as parquet."""

import filecmp
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from splitppo.jsonl import read_jsonl

Row = dict[str, Any]
_JSONL = (".jsonl", ".jsonl.gz", ".json")


class BadInput(ValueError):
    """Raised for input data that cannot be prepared; the message names the file, and the line of a wrong row."""


@dataclass(frozen=True)
class Example:
    """One row of a data set, before it is converted for training.

    Attributes:
        place: "file, line 7", for messages.
        fields: the fields of the row, as the file has them.
        split, index: the split and the position, from 0, of the prompt row that is made from this row.
    """

    place: str
    fields: Mapping[str, Any]
    split: str = "train"
    index: int = 0

    def text(self, *names: str, may_be_empty: bool = False) -> str:
        """Returns the text under the first of these field names that the row has.

        Raises:
            BadInput: the row has none of the names, or no text there.
        """
        for name in names:
            if name in self.fields:
                value = self.fields[name]
                if not isinstance(value, str) or not (may_be_empty or value.strip()):
                    got = repr(value) if value is None or isinstance(value, str | int) else type(value).__name__
                    raise BadInput(f"{self.place}: expected a text under {name!r}, got {got}")
                return value
        wanted = " or ".join(map(repr, names))
        there = ", ".join(self.fields) or "nothing"
        raise BadInput(f"{self.place}: expected a text under {wanted}, the row has {there}")

    def verl_row(
        self, data_source: str, prompt: str | list[dict[str, str]], ability: str, reward_model: Row, **extra_info: Any
    ) -> Row:
        """Makes a row of a prompt file in verl's schema; a prompt that is plain text becomes the user's message."""
        return {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
            "ability": ability,
            "reward_model": reward_model,
            "extra_info": {"split": self.split, "index": self.index, **extra_info},
        }


def read_rows(file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Reads a JSONL or parquet file and returns (file and line, fields by name) of each row.

    Raises:
        BadInput: the file cannot be read, has no rows, or a line is no JSON object.
    """
    if file.suffix != ".parquet" and not file.name.endswith(_JSONL):
        raise BadInput(f"{file}: expected a file that ends in .parquet, {', '.join(_JSONL)}")
    try:
        if file.suffix == ".parquet":
            rows = [(f"{file}, row {number}", row) for number, row in enumerate(pq.read_table(file).to_pylist(), 1)]
        else:
            rows = [(f"{file}, line {number}", row) for number, row in read_jsonl(file)]
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise BadInput(f"cannot read {file}: {first_line(error)}") from error
    except ValueError as error:
        raise BadInput(first_line(error)) from error
    if not rows:
        raise BadInput(f"{file} has no rows")
    return rows


def write_parquet(rows: list[Row], file: Path) -> bool:
    """Writes rows to a parquet file, whole or not at all; returns False if the same bytes are there already.

    Raises:
        BadInput: the file cannot be written there, or a column has values of several kinds.
    """
    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        table = pa.Table.from_pylist(rows)
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, unfinished)
        if file.is_file() and filecmp.cmp(file, unfinished, shallow=False):
            unfinished.unlink()
            return False
        unfinished.replace(file)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadInput(f"cannot write {file}: {first_line(error)}") from error
    return True


def first_line(error: Exception) -> str:
    """Returns the first line of an exception's message, for error messages of one line."""
    return str(error).strip().split("\n")[0]
