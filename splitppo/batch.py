"""Batches of ragged columns (a list of values per row): prompts, rollouts and experience in memory and over gRPC.

A column holds the concatenated values of all rows and the number of values in each row. Nothing is padded here; `pad`
and `unpad` convert to right-padded [B, T] arrays for vectorised arithmetic.

Large values that many rows have in common, as all samples of a prompt have its images, are in a shared column: it holds
the different rows once, in its store, and for each row the number of a stored one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias, overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitppo.columns import ColumnSpec, spec_of

# Many times the responses of a step. This limit bounds the header of a batch, and the memory taken before the first
# byte comes.
MAX_BATCH_ROWS = 1 << 17

# Longer rows are copied one by one, which is faster than by the position (8 bytes) of every value.
_LONG_ROW = 64

Array = NDArray[Any]
SharedName = Literal["images", "image_sizes"]
NO_STORED_ROWS: Mapping[str, NDArray[np.int32]] = {}


@dataclass(frozen=True, eq=False)
class Column:
    """One named column of a batch: ragged values, concatenated over all rows, and the length of each row."""

    values: Array  # [sum(lengths)], all rows back to back
    lengths: NDArray[np.int32]  # [num_rows], the number of values in each row

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Any] | Array], dtype: np.dtype[Any]) -> Self:
        """Returns a column that concatenates the given rows; an empty list gives a column of no rows."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        lengths = np.fromiter((len(array) for array in arrays), dtype=np.int32, count=len(arrays))
        return cls(np.concatenate(arrays) if arrays else np.empty(0, dtype), lengths)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[num_rows + 1] int64: the position in `values` where each row starts, then the number of values."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def rows(self) -> list[Array]:
        """Splits the column into rows; returns one array view for each row."""
        return np.split(self.values, self.offsets[1:-1]) if self.num_rows else []

    def sums(self) -> NDArray[np.float64]:
        """Sums the values of each row; returns [num_rows] float64."""
        sums = np.zeros(self.num_rows)
        rows = np.flatnonzero(self.lengths)
        if len(rows):
            sums[rows] = np.add.reduceat(self.values, self.offsets[rows], dtype=np.float64)
        return sums

    def take(self, indices: Array) -> "Column":
        """Returns a column with the rows at `indices`, in that order; rows may repeat.

        Long rows are copied one by one, short ones by the positions of all their values; the result is the same.
        """
        starts = self.offsets[:-1][indices]
        lengths = self.lengths[indices]
        if len(self.values) > _LONG_ROW * self.num_rows and len(indices):
            rows = [self.values[start : start + length] for start, length in zip(starts, lengths, strict=True)]
            return Column(np.concatenate(rows), lengths)
        ends = np.cumsum(lengths, dtype=np.int64)
        num_values = ends[-1] if len(ends) else 0
        shifts = starts - (ends - lengths)  # of each row: its start here, minus its start in the result
        positions = np.arange(num_values) + np.repeat(shifts, lengths)
        return Column(self.values[positions], lengths)

    def followed_by(self, other: "Column") -> "Column":
        """Returns a column in which each row has the values of this column's row, then those of the other's row."""
        parts = [row for rows in zip(self.rows(), other.rows(), strict=True) for row in rows]
        return Column(np.concatenate([self.values[:0], *parts]), self.lengths + other.lengths)

    def between(self, start: int, stop: int) -> "Column":
        """Returns a column with the rows from `start` to before `stop`, as a view without copying."""
        first = int(self.lengths[:start].sum(dtype=np.int64))
        lengths = self.lengths[start:stop]
        return Column(self.values[first : first + int(lengths.sum(dtype=np.int64))], lengths)

    def pad(self) -> Array:
        """Copies the rows into a new array [num_rows, width], right-padded with zeros to the longest row."""
        mask = self.mask()
        padded = np.zeros(mask.shape, self.values.dtype)
        padded[mask] = self.values
        return padded

    def mask(self) -> NDArray[np.bool_]:
        """Returns [num_rows, width] bool: True where the array of `pad` has a value of a row, False for padding."""
        return np.arange(self.lengths.max(initial=0)) < self.lengths[:, None]

    def unpad(self, padded: Array) -> "Column":
        """Converts a padded array, laid out as by `pad`, to a column with the row lengths of this column."""
        return Column(padded[self.mask()], self.lengths)

    @property
    def num_bytes(self) -> int:
        """The size of the values in bytes, as they are sent."""
        return self.values.nbytes

    @property
    def buffers(self) -> list[Array]:
        """The values as contiguous arrays, in the order in which they are sent: one array."""
        return [np.ascontiguousarray(self.values)]


@dataclass(frozen=True, eq=False)
class RowStore:
    """Different rows, which never change, and of which many rows of shared columns may each be one.

    Attributes:
        parts: columns, the rows of which are those of the store, one after the other. A longer store begins with the
            parts of a shorter one.
    """

    parts: tuple[Column, ...]

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """[num_rows] int32, the number of values in each row."""
        return np.concatenate([part.lengths for part in self.parts])

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0].values.dtype

    def rows(self, numbers: NDArray[np.int32]) -> list[Array]:
        """Returns the rows with these numbers as contiguous arrays, views of the store."""
        starts = np.concatenate([part.offsets[:-1] for part in self.parts])[numbers]
        stops = starts + self.lengths[numbers]
        last_rows = np.cumsum([part.num_rows for part in self.parts]) - 1
        parts = [self.parts[index].values for index in np.searchsorted(last_rows, numbers)]
        return [part[start:stop] for part, start, stop in zip(parts, starts.tolist(), stops.tolist(), strict=True)]

    def is_beginning_of(self, other: "RowStore") -> bool:
        """Returns True if the other store has the same rows with the same numbers, and perhaps more."""
        return len(self.parts) <= len(other.parts) and all(
            mine is theirs for mine, theirs in zip(self.parts, other.parts, strict=False)
        )

    def with_rows(self, rows: Sequence[Array]) -> "RowStore":
        """Returns a store that has copies of these rows after its own."""
        return RowStore((*self.parts, Column.from_rows(rows, self.dtype))) if rows else self


@dataclass(frozen=True, eq=False)
class SharedColumn:
    """One named column of a batch whose rows are rows of a store, which many rows may have in common.

    Taking rows moves their numbers alone; the store stays where it is, and may also have rows that none of this column
    is. What is sent has only the stored rows in use.

    Attributes:
        store: the stored rows.
        stored_rows: [num_rows] int32, the number of the stored row that each row is.
    """

    store: RowStore
    stored_rows: NDArray[np.int32]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Any] | Array], dtype: np.dtype[Any]) -> Self:
        """Returns a column of the given rows, which stores equal ones once."""
        arrays = [np.ascontiguousarray(row, dtype=dtype) for row in rows]
        digests = [_digest(array) for array in arrays]
        different = dict(zip(digests, arrays, strict=True))
        numbers = {digest: number for number, digest in enumerate(different)}
        stored_rows = np.array([numbers[digest] for digest in digests], np.int32)
        return cls(RowStore((Column.from_rows(list(different.values()), dtype),)), stored_rows)

    @property
    def num_rows(self) -> int:
        return len(self.stored_rows)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """[num_rows] int32, the number of values in each row."""
        lengths: NDArray[np.int32] = self.store.lengths[self.stored_rows]
        return lengths

    @cached_property
    def rows_in_use(self) -> NDArray[np.int32]:
        """The numbers of the stored rows that rows of this column are, ascending, each once; int32."""
        return np.unique(self.stored_rows)

    @property
    def places_in_use(self) -> NDArray[np.int32]:
        """[num_rows] int32: where the stored row that each row is stands in `rows_in_use`."""
        return np.searchsorted(self.rows_in_use, self.stored_rows).astype(np.int32)

    def rows(self) -> list[Array]:
        """Splits the column into rows; returns one array view for each row, of the store."""
        in_use = self.buffers
        return [in_use[place] for place in self.places_in_use]

    def take(self, indices: Array) -> "SharedColumn":
        """Returns a column with the rows at `indices`, in that order, of the same store; rows may repeat."""
        return SharedColumn(self.store, self.stored_rows[indices])

    def between(self, start: int, stop: int) -> "SharedColumn":
        """Returns a column with the rows from `start` to before `stop`, of the same store."""
        return SharedColumn(self.store, self.stored_rows[start:stop])

    @property
    def num_bytes(self) -> int:
        """The size of the stored rows in use in bytes, as they are sent."""
        num_values = int(self.store.lengths[self.rows_in_use].sum(dtype=np.int64))
        return num_values * self.store.dtype.itemsize

    @property
    def buffers(self) -> list[Array]:
        """The stored rows in use as views, in the order in which they are sent: an array for each of `rows_in_use`."""
        return self.store.rows(self.rows_in_use)

    @cached_property
    def digests(self) -> list[bytes]:
        """The digest of the values of each of `rows_in_use`."""
        return [_digest(row) for row in self.buffers]

    def moved(self, store: RowStore, numbers: Mapping[bytes, int]) -> "SharedColumn":
        """Returns the same rows as rows of another store, in which the rows with these digests have these numbers."""
        new_numbers = np.array([numbers[digest] for digest in self.digests], np.int32)
        return SharedColumn(store, new_numbers[self.places_in_use])


def in_store_of(kept: Sequence[SharedColumn], columns: Sequence[SharedColumn]) -> list[SharedColumn]:
    """Returns `columns` in one store: the longest one of `kept`, and after it copies of what it lacks.

    Rows are compared by their digests, which are computed where columns have other stores alone. Rows that none of the
    columns uses are not looked at.
    """
    store = max((column.store for column in kept), key=lambda store: len(store.parts))
    others = [column for column in columns if not column.store.is_beginning_of(store)]
    numbers: dict[bytes, int] = {}
    if others:
        for column in (*kept, *columns):
            if column.store.is_beginning_of(store):
                numbers |= zip(column.digests, column.rows_in_use.tolist(), strict=True)
    new_rows: list[Array] = []
    for column in others:
        for digest, row in zip(column.digests, column.buffers, strict=True):
            if digest not in numbers:
                numbers[digest] = store.num_rows + len(new_rows)
                new_rows.append(row)
    longer = store.with_rows(new_rows)
    return [
        column.moved(longer, numbers) if column in others else SharedColumn(longer, column.stored_rows)
        for column in columns
    ]


AnyColumn: TypeAlias = Column | SharedColumn


def _digest(values: Array) -> bytes:
    """Returns the XXH3-128 digest of contiguous values, by which equal rows are found."""
    return xxhash.xxh3_128_digest(values.view(np.uint8).data if len(values) else b"")


@dataclass(frozen=True, eq=False)
class Batch:
    """Named ragged columns over the same rows, e.g. responses and their log-probs.

    The columns are checked when a batch is made; `trusted` skips this for columns of a batch that was checked.

    Raises:
        ValueError: a column is unknown, has another dtype than the table of columns says, another number of rows,
            lengths that do not add up to its values, or not as many values per row or response token as its kind has;
            a column is shared where its kind is not, or not shared where it is, or has a row that is not stored.
    """

    num_rows: int
    columns: Mapping[str, AnyColumn]
    trusted: InitVar[bool] = False

    def __post_init__(self, trusted: bool) -> None:
        if trusted:
            return
        for name, column in self.columns.items():
            _check_column(name, column, self.num_rows)
            if spec_of(name).is_of_tokens and "responses" in self.columns:
                _check_tokens(name, self[name], self["responses"])

    @classmethod
    def from_rows(cls, **rows: Sequence[Sequence[Any] | Array]) -> Self:
        """Makes a batch from lists of rows, one keyword argument for each column."""
        columns: dict[str, AnyColumn] = {}
        for name, values in rows.items():
            spec = spec_of(name)
            kind = SharedColumn if spec.is_shared else Column
            columns[name] = kind.from_rows(values, spec.dtype)
        return cls(next(iter(columns.values())).num_rows, columns)

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        lengths: Mapping[str, NDArray[np.int32]],
        stored_rows: Mapping[str, NDArray[np.int32]] = NO_STORED_ROWS,
    ) -> Self:
        """Makes a batch into which values can be received: columns with uninitialised values.

        Args:
            num_rows: of the batch.
            lengths: the row lengths of each column, of a shared one those of its stored rows, in the order in which a
                sender sends the values.
            stored_rows: the numbers of the stored rows of each shared column.
        """
        columns: dict[str, AnyColumn] = {}
        for name, row_lengths in lengths.items():
            values = np.empty(int(row_lengths.sum(dtype=np.int64)), spec_of(name).dtype)
            column = Column(values, row_lengths)
            if name in stored_rows:
                columns[name] = SharedColumn(RowStore((column,)), stored_rows[name])
            else:
                columns[name] = column
        return cls(num_rows, columns)

    @overload
    def __getitem__(self, name: SharedName) -> SharedColumn: ...  # type: ignore[overload-overlap]

    @overload
    def __getitem__(self, name: str) -> Column: ...

    def __getitem__(self, name: str) -> AnyColumn:
        """Returns a column; KeyError with those that the batch has if it lacks the column."""
        if name not in self.columns:
            raise KeyError(f"the batch has no column {name!r}, it has {', '.join(self.columns) or 'none'}")
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    @property
    def plain_columns(self) -> dict[str, Column]:
        """The columns that are not shared."""
        return {name: column for name, column in self.columns.items() if isinstance(column, Column)}

    @property
    def buffers(self) -> list[Array]:
        """The values of all columns as contiguous arrays, in the order in which they are sent."""
        return [values for column in self.columns.values() for values in column.buffers]

    @property
    def num_bytes(self) -> int:
        """The size of all values in bytes, as they are sent: of shared columns the stored rows in use, once."""
        return sum(column.num_bytes for column in self.columns.values())

    def select(self, names: Iterable[str]) -> "Batch":
        """Returns a batch with only the named columns; KeyError if one of them is missing."""
        return Batch(self.num_rows, {name: self[name] for name in names}, trusted=True)

    def merge(self, other: "Batch") -> "Batch":
        """Returns this batch with the columns of `other`, which must have the same rows, added or replaced."""
        if other.num_rows != self.num_rows:
            raise ValueError(f"cannot merge a batch of {other.num_rows} rows into one of {self.num_rows}")
        return Batch(self.num_rows, {**self.columns, **other.columns})

    def stored_with(self, others: Sequence["Batch"]) -> "Batch":
        """Returns this batch with its shared columns in stores of others, so that what they have is stored once."""
        columns = dict(self.columns)
        for name, column in self.columns.items():
            if isinstance(column, SharedColumn):
                theirs = [other.columns[name] for other in others if name in other]
                kept = [other for other in theirs if isinstance(other, SharedColumn)]
                (columns[name],) = in_store_of(kept or [column], [column])
        return Batch(self.num_rows, columns, trusted=True)

    def take(self, indices: Array) -> "Batch":
        """Returns a batch with the rows at `indices`, in that order; rows may repeat."""
        return Batch(len(indices), {name: column.take(indices) for name, column in self.columns.items()}, trusted=True)

    def between(self, start: int, stop: int) -> "Batch":
        """Returns a batch with the rows from `start` to before `stop`, as views without copying."""
        columns = {name: column.between(start, stop) for name, column in self.columns.items()}
        return Batch(len(range(self.num_rows)[start:stop]), columns, trusted=True)


def held_bytes(batches: Iterable[Batch]) -> int:
    """Returns the memory, in bytes, of values and row lengths of all columns; what they store together counts once."""
    num_bytes = 0
    stored: dict[int, Column] = {}
    for column in (column for batch in batches for column in batch.columns.values()):
        if isinstance(column, SharedColumn):
            num_bytes += column.stored_rows.nbytes
            stored |= {id(part): part for part in column.store.parts}
        else:
            num_bytes += column.values.nbytes + column.lengths.nbytes
    return num_bytes + sum(part.values.nbytes + part.lengths.nbytes for part in stored.values())


def _check_column(name: str, column: AnyColumn, num_rows: int) -> None:
    """Raises ValueError unless a column has the type, the number of rows and the row lengths of its name."""
    spec = spec_of(name)
    if isinstance(column, SharedColumn) != spec.is_shared:
        raise ValueError(f"column {name!r} must {'' if spec.is_shared else 'not '}be shared")
    if column.num_rows != num_rows:
        raise ValueError(f"column {name!r} has {column.num_rows} rows, the batch has {num_rows}")
    if isinstance(column, SharedColumn):
        check_stored_rows(name, column.stored_rows, column.store.num_rows)
    for part in column.store.parts if isinstance(column, SharedColumn) else (column,):
        _check_values(name, part, spec)


def _check_values(name: str, column: Column, spec: ColumnSpec) -> None:
    """Raises ValueError unless values, or stored ones, have the type of a column, and the row lengths of its kind."""
    if column.values.dtype != spec.dtype or column.values.ndim != 1:
        raise ValueError(
            f"column {name!r} must be 1-dimensional {spec.dtype}, got {column.values.dtype}"
            f" with shape {column.values.shape}"
        )
    if (column.lengths < 0).any() or int(column.lengths.sum(dtype=np.int64)) != len(column.values):
        raise ValueError(f"column {name!r}: its row lengths do not add up to its {len(column.values)} values")
    if spec.kind == "one_per_row" and (column.lengths != 1).any():
        raise ValueError(f"column {name!r} must have one value per row")


def check_stored_rows(name: str, stored_rows: Array, num_stored: int) -> None:
    """Raises ValueError unless each row of a shared column is one of its stored rows."""
    wrong = np.flatnonzero((stored_rows < 0) | (stored_rows >= num_stored))
    if len(wrong):
        row = wrong[0]
        raise ValueError(f"column {name!r}, row {row}: it has no stored row {stored_rows[row]}, only {num_stored}")


def _check_tokens(name: str, column: Column, responses: Column) -> None:
    """Raises ValueError unless a column has one value, or as its kind says equally many, for each response token."""
    is_several = spec_of(name).kind == "several_per_token"
    num_each = len(column.values) // max(1, len(responses.values)) if is_several else 1
    if not np.array_equal(column.lengths, responses.lengths * np.int64(num_each)):
        values = "equally many values" if is_several else "one value"
        raise ValueError(f"column {name!r} must have {values} per response token, its row lengths differ")


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Concatenates batches: the rows of one batch after those of the other; a single batch stays as it is.

    What shared columns have in common is kept once.

    Raises:
        ValueError: the batches have different columns.
    """
    if len(batches) == 1:
        return batches[0]
    names = batches[0].columns.keys()
    if any(batch.columns.keys() != names for batch in batches):
        raise ValueError("cannot concatenate batches with different columns")
    columns = {name: _joined([batch.columns[name] for batch in batches]) for name in names}
    return Batch(sum(batch.num_rows for batch in batches), columns)


def _joined(columns: Sequence[AnyColumn]) -> AnyColumn:
    """Returns a column with the rows of all columns, which are of one kind, one after the other."""
    shared = [column for column in columns if isinstance(column, SharedColumn)]
    if shared:
        moved = in_store_of(shared, shared)
        return SharedColumn(moved[0].store, np.concatenate([column.stored_rows for column in moved]))
    plain = [column for column in columns if isinstance(column, Column)]
    values = np.concatenate([column.values for column in plain])
    return Column(values, np.concatenate([column.lengths for column in plain]))


def join_parts(parts: Sequence[Batch]) -> Batch:
    """Joins streamed parts into the whole batch, in which every row is at its position (column `places`).

    The whole has the columns that all parts have. Without the column `places` one part follows the other.

    Raises:
        ValueError: a row does not have one position in `places`, or the positions are not 0 to num_rows - 1, each once.
    """
    common = [name for name in parts[0].columns if all(name in part for part in parts)]
    joined = concatenate([part.select(common) for part in parts])
    if "places" not in joined:
        return joined
    if (joined["places"].lengths != 1).any():
        raise ValueError("column 'places' must have one value per row in parts")
    order = row_order(joined["places"].values)
    return joined.select(name for name in common if name != "places").take(order)


def row_order(places: Array) -> NDArray[np.int64]:
    """Inverts a permutation: for each row of the whole batch, its index among the rows of the parts, [num_rows] int64.

    Raises:
        ValueError: `places` are not 0 to num_rows - 1, each once.
    """
    order = np.argsort(places, kind="stable")
    if not np.array_equal(places[order], np.arange(len(places))):
        raise ValueError(f"the parts must hold each of {len(places)} rows once, by their places")
    return order
