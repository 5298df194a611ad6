"""Reads rollouts/train/{step}.parquet and rollouts/val/{step}.parquet, as docs/run-folder.md describes them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from splitppo.run_folder.columns import NAMES, NUMBERS, TEXTS, TOKEN_LISTS, TURN_LISTS
from splitppo.run_folder.files import MAX_PARQUET_BYTES, RunDir, Unreadable, json_object
from splitppo.run_folder.images import COLUMN, names_in
from splitppo.run_folder.rollout_writer import FOOTER_KEY

MAX_ROWS = 200_000
MAX_UNPACKED_BYTES = 1 << 30
MAX_TABLE_BYTES = 1 << 28
# Of what a page gets: each value takes some 30 bytes of memory, and up to 6 for each byte of a text.
MAX_VALUES = 1 << 24
MAX_TEXT_BYTES = 1 << 27
MAX_READ_VALUES = 1 << 26
_BATCH_ROWS = 256
MAX_TOKENS = 1_000_000
# A table shows so many characters of a text: of a prompt, the question stands at its end.
_EXCERPT = 120
_EXCERPTS: Mapping[str, Callable[[str | None], str | None]] = {
    "prompt": lambda text: text and text[-_EXCERPT:],
    "response": lambda text: text and text[:_EXCERPT],
}
_DRAWN = 1  # bit of `why`: the response was drawn at random
_LEARNED = 2  # bit of `flags`: the token is learned from
Float64s = NDArray[np.float64]


def read_scalars(folder: RunDir, kind: str, step: int, text: str = "") -> dict[str, Any]:
    """Reads the columns of all rows of a step: {"step", "footer": {...}, "columns": {name: [...]}}.

    Of recorded texts it has what a table shows: the end of the prompt and the beginning of the response, None for
    others. Two columns are not in the file: `step`, and, if a text is given, `found`: True for rows whose recorded
    texts have it, in capitals or not. `text_hash` stays a text, because a number of 64 bits is none of JavaScript's.

    Raises:
        Unreadable: the file cannot be read.
    """
    with _parquet(folder, kind, step) as (file, reader):
        columns = _values(_table(file, reader, (*NUMBERS, *TEXTS)))
        if "row" not in columns:
            raise Unreadable(f"{file} has no column `row`.")
        columns["step"] = [step] * len(columns["row"])
        texts = {name: columns.pop(name) for name in TEXTS if name in columns}
        if text:
            together = zip(*texts.values(), strict=True) if texts else [()] * len(columns["row"])
            columns["found"] = [text.casefold() in "\0".join(filter(None, row)).casefold() for row in together]
        columns |= {name: list(map(excerpt, texts[name])) for name, excerpt in _EXCERPTS.items() if name in texts}
        return {"step": step, "footer": _footer(reader, file), "columns": columns}


def read_footer(folder: RunDir, step: int) -> dict[str, Any]:
    """Reads what a step says about all its tokens, without its rows."""
    with _parquet(folder, "train", step) as (file, reader):
        return _footer(reader, file)


def read_drawn(folder: RunDir, step: int) -> tuple[dict[str, Any], dict[str, Float64s]]:
    """Reads the footer of a step, and the numbers of the tokens that represent it.

    These are the tokens that are learned from, of responses that were drawn at random: {column: values, one after the
    other}. A column that one of these responses lacks is left out.
    """
    with _parquet(folder, "train", step) as (file, reader):
        kinds = {field.name: field.type for field in reader.schema_arrow}
        names = [name for name in ("flags", "old", "new", "entropy_tokens") if _is_list_of_numbers(kinds.get(name))]
        drawn: dict[str, Float64s] = {}
        if "flags" in names and pa.types.is_integer(kinds.get("why", pa.null())):
            table = _table(file, reader, ["why", *names])
            rows = table.filter(pc.equal(pc.bit_wise_and(table["why"].fill_null(0), _DRAWN), _DRAWN))
            lists = {name: rows[name].combine_chunks() for name in names}
            lengths = pc.list_value_length(lists["flags"])
            is_learned = lists.pop("flags").flatten().to_numpy(zero_copy_only=False).astype(np.int64) & _LEARNED > 0
            for name, column in lists.items():
                if column.null_count == 0 and pc.list_value_length(column).equals(lengths):
                    drawn[name] = column.flatten().to_numpy(zero_copy_only=False).astype(np.float64)[is_learned]
        return _footer(reader, file), drawn


def _is_list_of_numbers(kind: Any) -> bool:
    is_list = kind is not None and pa.types.is_list(kind)
    return is_list and (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type))


def read_row(folder: RunDir, kind: str, step: int, row: int) -> dict[str, Any]:
    """Reads one response: its scalars, texts, names of images, and lists per token, None if they were not recorded.

    Raises:
        Unreadable: the step has no such row, or its lists do not fit each other.
    """
    [found] = read_rows(folder, kind, step, [row])
    if isinstance(found, Unreadable):
        raise found
    return found


def read_rows(folder: RunDir, kind: str, step: int, rows: Iterable[int]) -> Iterator[dict[str, Any] | Unreadable]:
    """Reads responses of one step one by one, as `read_row` does, from a file that is opened once.

    In place of a response that cannot be read stands the error that says why.

    Raises:
        Unreadable: the file cannot be read.
    """
    names = (*NUMBERS, *TEXTS, *NAMES, *TOKEN_LISTS, *TURN_LISTS)
    with _parquet(folder, kind, step) as (file, reader):
        table = _table(file, reader, names)
        for row in rows:
            try:
                if not 0 <= row < len(table):
                    raise Unreadable(f"{file} has no row {row}.")
                columns = _values(table.slice(row, 1))
                values = dict.fromkeys(names) | {name: column[0] for name, column in columns.items()}
                values[COLUMN] = names_in(values[COLUMN])
                _check_lists(values, file)
            except Unreadable as error:
                yield error
            else:
                yield values


def read_fixed(folder: RunDir, step: int, prompt: int | None = None) -> list[dict[str, Any]]:
    """Reads the responses to the fixed prompts of a validation, or to one of them; None where it has no such column.

    Raises:
        Unreadable: the file cannot be read.
    """
    of_all = ("row", "prompt_index", "sample", "data_source", "place", "score", "has_eos", "length")
    names = (*of_all, *TEXTS[:3], *NAMES)
    with _parquet(folder, "val", step) as (file, reader):
        table = _table(file, reader, (*names, "fixed"))
        table = table.filter(table["fixed"])
        if prompt is not None:
            table = table.filter(pc.equal(table["prompt_index"], prompt))
        values = _values(table)
        values[COLUMN] = [names_in(value) for value in values.get(COLUMN, [None] * len(table))]
        return [{name: values[name][row] if name in values else None for name in names} for row in range(len(table))]


def _check_lists(values: Mapping[str, Any], place: str) -> None:
    """Raises Unreadable for lists of other than numbers or not one per token, or that do not say where each token ends.

    `ends` says where the text of each token ends, so it never falls; each token has one of `flags`.
    """
    for name in (*TOKEN_LISTS, *TURN_LISTS):
        numbers = [] if values[name] is None else values[name]
        if not isinstance(numbers, list) or not all(one is None or isinstance(one, int | float) for one in numbers):
            raise Unreadable(f"{place}: {name} is no list of numbers.")
    lists = {name: values[name] for name in TOKEN_LISTS if values[name] is not None}
    lengths = {name: len(numbers) for name, numbers in lists.items()}
    if len(set(lengths.values())) > 1 or max(lengths.values(), default=0) > MAX_TOKENS:
        raise Unreadable(f"{place}: the lists of its tokens differ in length: {lengths}.")
    ends, flags = ([0, *lists.get(name, [])] for name in ("ends", "flags"))
    if (
        not all(isinstance(number, int) and number < 1 << 31 for number in (*ends, *flags))
        or sorted(ends) != ends
        or len(ends) > len(flags)
    ):
        raise Unreadable(f"{place}: the ends of its tokens do not rise, or it has no flags.")


@contextmanager
def _parquet(folder: RunDir, kind: str, step: int) -> Iterator[tuple[str, Any]]:
    """Opens the parquet file of a step: (its name, reader); whatever is wrong with it becomes one sentence."""
    name = f"rollouts/{kind}/{step}.parquet"
    with folder.open("rollouts", kind, f"{step}.parquet", max_bytes=MAX_PARQUET_BYTES) as stream:
        try:
            reader = pq.ParquetFile(stream)
            facts = reader.metadata
            unpacked = sum(facts.row_group(group).total_byte_size for group in range(facts.num_row_groups))
            if facts.num_rows > MAX_ROWS or unpacked > MAX_UNPACKED_BYTES:
                raise Unreadable(f"{name} has {facts.num_rows:,} rows and {unpacked:,} bytes, which is too much.")
            yield name, reader
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise Unreadable(f"{name} is torn or no parquet file of a run: {reason.rstrip('.')}.") from error


def _table(file: str, reader: Any, names: Sequence[str]) -> Any:
    """Reads those of some columns that are there.

    What comes out is bounded, not what lies in the file: there, a value that stands for many rows is stored once. So
    only kinds of columns are read that hold each value on its own, and so few rows at a time that no value of the file
    could make them too large.
    """
    schema = reader.schema_arrow  # made anew each time that it is asked for
    there = [name for name in names if name in schema.names]
    for name in there:
        if not _is_plain(kind := schema.field(name).type):
            told = str(kind)[:80]
            raise Unreadable(f"{file} has a column {name} of {told}, which is what no run writes.")
    declared, largest = _declared(reader, there)
    _check_size(file, declared, 0)
    rows_at_a_time = max(1, min(_BATCH_ROWS, MAX_TABLE_BYTES // max(1, largest)))
    batches = list[Any]()
    num_values = 0
    size = 0
    for batch in reader.iter_batches(rows_at_a_time, columns=there, use_threads=False):
        num_values += sum(map(_num_values, batch.columns))
        size += batch.nbytes
        _check_size(file, num_values, size)
        batches.append(batch)
    return pa.Table.from_batches(batches, pa.schema([schema.field(name) for name in there]))


def _check_size(file: str, num_values: int, num_bytes: int) -> None:
    """Raises Unreadable for more than the viewer holds of a file."""
    if num_values > MAX_READ_VALUES or num_bytes > MAX_TABLE_BYTES:
        raise Unreadable(
            f"{file} unfolds to {num_values:,} values and {num_bytes:,} bytes, or more; the viewer reads at most"
            f" {MAX_READ_VALUES:,} and {MAX_TABLE_BYTES:,}."
        )


def _declared(reader: Any, names: Sequence[str]) -> tuple[int, int]:
    """Returns what a file says about some columns: how many values they have, and bytes of the largest row group."""
    num_values = 0
    largest = 0
    for group in map(reader.metadata.row_group, range(reader.metadata.num_row_groups)):
        chunks = [group.column(number) for number in range(group.num_columns)]
        asked = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in names]
        num_values += sum(chunk.num_values for chunk in asked)
        largest = max(largest, sum(chunk.total_uncompressed_size for chunk in asked))
    return num_values, largest


def _is_plain(kind: Any) -> bool:
    """Returns True for the kinds of columns that hold each value of a row on its own, as a run writes them."""
    types = pa.types
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind)
    is_number = types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind)
    return is_text or is_number or types.is_null(kind) or _is_list_of_numbers(kind)


def _footer(reader: Any, name: str) -> dict[str, Any]:
    return json_object((reader.schema_arrow.metadata or {}).get(FOOTER_KEY, b"{}"), f"{name}: its footer")


def _values(table: Any) -> dict[str, list[Any]]:
    """Makes Python values of all columns; `text_hash` becomes a text, because a page has no numbers of 64 bits.

    Raises:
        Unreadable: there are more values or texts than MAX_VALUES and MAX_TEXT_BYTES.
    """
    num_values = sum(_num_values(column) for column in table.columns)
    text_bytes = sum(column.nbytes for column in table.columns if not _is_list_of_numbers(column.type))
    if num_values > MAX_VALUES or text_bytes > MAX_TEXT_BYTES:
        raise Unreadable(f"this step has {num_values:,} values and {text_bytes:,} bytes of texts, which is too much.")
    values = {name: plain(table[name]) for name in table.column_names}
    if "text_hash" in values:
        values["text_hash"] = [None if one is None else str(one) for one in values["text_hash"]]
    return values


def _num_values(column: Any) -> int:
    """Counts the values of a column, those within lists, too."""
    in_lists = pc.sum(pc.list_value_length(column)).as_py() if _is_list_of_numbers(column.type) else 0
    return len(column) + (in_lists or 0)


def plain(column: Any) -> list[Any]:
    """Makes Python values of a column; broken UTF-8 is replaced."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = column.cast(pa.large_binary())
    elif pa.types.is_list(kind) and pa.types.is_float16(kind.value_type):
        column = column.cast(pa.list_(pa.float32()))
    return [value.decode(errors="replace") if isinstance(value, bytes) else value for value in column.to_pylist()]
