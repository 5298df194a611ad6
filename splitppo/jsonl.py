"""Reads JSONL files, which have one JSON object on each line."""

import gzip
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from splitppo.plain_file import open_plain

MAX_LINE_BYTES = 2**26


def read_jsonl(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reads a JSONL file; yields (line number from 1, object) for each line that is not blank.

    A file `*.gz` is unpacked. A file that a process appends to, and may have left with a torn last line, is read by
    `splitppo.run_folder.append_log`.

    Raises:
        ValueError: a line is no JSON object, no UTF-8 text, or has more than MAX_LINE_BYTES; or this is no file,
            such as a pipe, which would be waited for. The message names file and line.
    """
    with open_plain(file) as stream:
        lines = gzip.GzipFile(fileobj=stream) if file.suffix == ".gz" else stream
        for number, line in enumerate(iter(partial(lines.readline, MAX_LINE_BYTES + 1), b""), start=1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{file}, line {number}: it has more than {MAX_LINE_BYTES >> 20} MiB")
            if line.strip():
                yield number, json_object(line, f"{file}, line {number}")


def json_object(line: bytes, place: str) -> dict[str, Any]:
    """Parses a line of bytes as a JSON object; else raises a ValueError that begins with `place` (file, line)."""
    try:
        content = json.loads(line.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 text: {error}") from error
    except json.JSONDecodeError as error:
        reason = f"{error.msg.removesuffix(' at')}, at column {error.colno}"
        raise ValueError(f"{place}: not valid JSON: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{place}: expected a JSON object, got {type(content).__name__}")
    return content
