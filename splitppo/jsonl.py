"""JSONL: one JSON object per line."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_jsonl(file: Path, *, until_torn: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file, each with the number of its line, from 1; blank lines are passed over; `.gz` is unpacked.

    With `until_torn` it ends before the first line that a crash has left incomplete.

    Raises:
        ValueError: a line is no JSON object, or no UTF-8 text; names file and line.
    """
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                content = _json_object(line)
            except ValueError as error:
                if until_torn:
                    return
                raise ValueError(f"{file}, line {number}: {error}") from error
            if until_torn and not line.endswith(b"\n"):
                return
            yield number, content


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error}") from error
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, got {type(content).__name__}")
    return content
