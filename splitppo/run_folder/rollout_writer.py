"""Makes the content of rollouts/*/N.parquet of columns, and takes the lists of tokens out of it again.

pyarrow is slow to import: who needs this file imports it where it is needed. `rollouts` reads the files.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from splitppo.run_folder.append_log import json_line
from splitppo.run_folder.columns import TOKEN_LISTS

FOOTER_KEY = b"splitppo"
_VERSION = 1
_SAME_OFTEN = ["data_source", "place", "extra", "failure", "prompt", "ground_truth"]


def step_file(columns: Mapping[str, Any], step: int, **facts: Any) -> Any:
    """Returns the content of a file with these columns as a buffer; `facts` are for its footer, as JSON."""
    table = pa.table(dict(columns))
    footer = {"version": _VERSION, "step": step, "num_rows": len(table), "unix_s": time.time(), **facts}
    return _written(table, json_line(footer))


def has_tokens(path: Path) -> bool:
    """Returns False for the file of a step that has lost its lists of tokens."""
    return not set(TOKEN_LISTS).isdisjoint(pq.read_schema(path).names)


def without_tokens(content: Any) -> Any:
    """Returns the content of a file of a step without its lists of tokens."""
    table = pq.read_table(pa.BufferReader(content))
    left = table.drop_columns([name for name in TOKEN_LISTS if name in table.column_names])
    return _written(left, table.schema.metadata[FOOTER_KEY])


def _written(table: Any, footer: bytes) -> Any:
    """Writes a table as parquet into memory; lists of floats byte by byte, which halves their size."""
    lists = (field for field in table.schema if pa.types.is_list(field.type))
    floats = [field.name for field in lists if pa.types.is_floating(field.type.value_type)]
    buffer = pa.BufferOutputStream()
    with pq.ParquetWriter(
        buffer,
        table.schema.remove_metadata(),
        compression="zstd",
        use_dictionary=[name for name in _SAME_OFTEN if name in table.column_names],
        column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in floats},
        store_schema=False,  # parquet has all its types
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({FOOTER_KEY: footer})
    return buffer.getvalue()
