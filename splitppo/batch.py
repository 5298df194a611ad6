"""Batches of ragged columns (a list of values per row): prompts, rollouts and experience in memory and over gRPC.

A column holds the concatenated values of all rows and the number of values in each row. Nothing is padded here; `pad`
and `unpad` convert to right-padded [B, T] arrays for vectorised arithmetic.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from splitppo.columns import spec_of

# Many times the responses of a step. This limit bounds the header of a batch, and the memory taken before the first
# byte comes.
MAX_BATCH_ROWS = 1 << 17

# Longer rows are copied one by one, which is faster than by the position (8 bytes) of every value.
_LONG_ROW = 64

Array = NDArray[Any]


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


@dataclass(frozen=True, eq=False)
class Batch:
    """Named ragged columns over the same rows, e.g. responses and their log-probs.

    The columns are checked when a batch is made; `trusted` skips this for columns of a batch that was checked.

    Raises:
        ValueError: a column is unknown, has another dtype than the table of columns says, another number of rows,
            lengths that do not add up to its values, or not as many values per row or response token as its kind has.
    """

    num_rows: int
    columns: Mapping[str, Column]
    trusted: InitVar[bool] = False

    def __post_init__(self, trusted: bool) -> None:
        if trusted:
            return
        for name, column in self.columns.items():
            _check_column(name, column, self.num_rows)
            if spec_of(name).is_of_tokens and "responses" in self.columns:
                _check_tokens(name, column, self.columns["responses"])

    @classmethod
    def from_rows(cls, **rows: Sequence[Sequence[Any] | Array]) -> Self:
        """Makes a batch from lists of rows, one keyword argument for each column."""
        columns = {name: Column.from_rows(values, spec_of(name).dtype) for name, values in rows.items()}
        return cls(next(iter(columns.values())).num_rows, columns)

    @classmethod
    def allocate(cls, num_rows: int, lengths: Mapping[str, NDArray[np.int32]]) -> Self:
        """Makes a batch into which values can be received: columns of these row lengths with uninitialised values.

        `lengths` has the row lengths of each column, in the order in which a sender sends the values.
        """
        columns = {
            name: Column(np.empty(int(row_lengths.sum(dtype=np.int64)), spec_of(name).dtype), row_lengths)
            for name, row_lengths in lengths.items()
        }
        return cls(num_rows, columns)

    def __getitem__(self, name: str) -> Column:
        """Returns a column; KeyError with those that the batch has if it lacks the column."""
        if name not in self.columns:
            raise KeyError(f"the batch has no column {name!r}, it has {', '.join(self.columns) or 'none'}")
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    @property
    def buffers(self) -> list[Array]:
        """The contiguous value arrays of all columns, in the order in which they are sent."""
        return [np.ascontiguousarray(column.values) for column in self.columns.values()]

    @property
    def num_bytes(self) -> int:
        return sum(column.values.nbytes for column in self.columns.values())

    @property
    def held_bytes(self) -> int:
        """The memory, in bytes, of the values and row lengths of all columns."""
        return sum(column.values.nbytes + column.lengths.nbytes for column in self.columns.values())

    def select(self, names: Iterable[str]) -> "Batch":
        """Returns a batch with only the named columns; KeyError if one of them is missing."""
        return Batch(self.num_rows, {name: self[name] for name in names}, trusted=True)

    def merge(self, other: "Batch") -> "Batch":
        """Returns this batch with the columns of `other`, which must have the same rows, added or replaced."""
        if other.num_rows != self.num_rows:
            raise ValueError(f"cannot merge a batch of {other.num_rows} rows into one of {self.num_rows}")
        return Batch(self.num_rows, {**self.columns, **other.columns})

    def take(self, indices: Array) -> "Batch":
        """Returns a batch with the rows at `indices`, in that order; rows may repeat."""
        return Batch(len(indices), {name: column.take(indices) for name, column in self.columns.items()}, trusted=True)

    def between(self, start: int, stop: int) -> "Batch":
        """Returns a batch with the rows from `start` to before `stop`, as views without copying."""
        columns = {name: column.between(start, stop) for name, column in self.columns.items()}
        return Batch(len(range(self.num_rows)[start:stop]), columns, trusted=True)


def _check_column(name: str, column: Column, num_rows: int) -> None:
    """Raises ValueError unless a column has the type, the number of rows and the row lengths of its name."""
    spec = spec_of(name)
    if column.values.dtype != spec.dtype or column.values.ndim != 1:
        raise ValueError(
            f"column {name!r} must be 1-dimensional {spec.dtype}, got {column.values.dtype}"
            f" with shape {column.values.shape}"
        )
    if column.num_rows != num_rows:
        raise ValueError(f"column {name!r} has {column.num_rows} rows, the batch has {num_rows}")
    if (column.lengths < 0).any() or int(column.lengths.sum(dtype=np.int64)) != len(column.values):
        raise ValueError(f"column {name!r}: its row lengths do not add up to its {len(column.values)} values")
    if spec.kind == "one_per_row" and (column.lengths != 1).any():
        raise ValueError(f"column {name!r} must have one value per row")


def _check_tokens(name: str, column: Column, responses: Column) -> None:
    """Raises ValueError unless a column has one value, or as its kind says equally many, for each response token."""
    is_several = spec_of(name).kind == "several_per_token"
    num_each = len(column.values) // max(1, len(responses.values)) if is_several else 1
    if not np.array_equal(column.lengths, responses.lengths * np.int64(num_each)):
        values = "equally many values" if is_several else "one value"
        raise ValueError(f"column {name!r} must have {values} per response token, its row lengths differ")


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Concatenates batches: the rows of one batch after those of the other; a single batch stays as it is.

    Raises:
        ValueError: the batches have different columns.
    """
    if len(batches) == 1:
        return batches[0]
    names = batches[0].columns.keys()
    if any(batch.columns.keys() != names for batch in batches):
        raise ValueError("cannot concatenate batches with different columns")
    columns = {}
    for name in names:
        values = np.concatenate([batch[name].values for batch in batches])
        columns[name] = Column(values, np.concatenate([batch[name].lengths for batch in batches]))
    return Batch(sum(batch.num_rows for batch in batches), columns)


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
