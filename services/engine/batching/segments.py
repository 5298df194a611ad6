"""Divides rows with several contexts into rows of one context each, before micro-batches are made of them.

This is the one place where it happens: what comes after it (micro-batches, forward passes, losses) has rows of one
context, and if a value model reads privileged tokens, each context begins with them. What is computed for these rows is
put back into whole rows by `SegmentRows.put_back`.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from splitppo.batch import AnyColumn, Array, Batch, Column
from splitppo.columns import spec_of
from splitppo.segments import Segments

# Columns of whole rows that say what the prompts of segments are.
_MADE_INTO_ROWS = frozenset({"segments", "privileged_tokens"})


@dataclass(frozen=True, eq=False)
class SegmentRows:
    """The segments of a batch's rows, each as a row of its own; rows of one context stay as they are.

    Attributes:
        batch: one row for each segment. Its prompt is the segment's context, after the row's privileged tokens if there
            are any; its response is what follows in the segment. Columns of response tokens are cut in the same way,
            and other columns repeated. The column `segment_of` has the number of the whole row; it is absent where
            every row is one segment.
        rows: the number of the whole row of each segment, ascending, [num_segments] int64.
        first_tokens: where the response of each segment begins among the response tokens of all whole rows,
            [num_segments] int64.
        response_lengths: the response tokens of each whole row, contexts included, [num_rows] int32.
    """

    batch: Batch
    rows: NDArray[np.int64]
    first_tokens: NDArray[np.int64]
    response_lengths: NDArray[np.int32]

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Divides rows by the column `segments`; the segments have neither it nor `privileged_tokens`.

        Raises:
            ValueError: the column divides no row, see `Segments.of`.
        """
        segments = Segments.of(batch)
        responses = batch["responses"]
        first_tokens = responses.offsets[:-1][segments.rows] + segments.begins + segments.contexts
        rows = batch.select(name for name in batch.columns if name not in _MADE_INTO_ROWS)
        if len(segments.rows) > batch.num_rows:
            rows = _divided(rows, segments, first_tokens)
        if "privileged_tokens" in batch:
            prompts = batch["privileged_tokens"].take(segments.rows).followed_by(rows["prompts"])
            rows = Batch(rows.num_rows, {**rows.columns, "prompts": prompts}, trusted=True)
        return cls(rows, segments.rows, first_tokens, responses.lengths)

    def put_back(self, column: Column, rows: NDArray[np.bool_] | None = None) -> Column:
        """Returns a column of whole rows from one with values for the response tokens of segments, one each or several.

        The tokens of contexts get 0. `rows` are the whole rows that get values, [num_rows] bool (None: all); the others
        are empty, and so may be their segments.
        """
        num_tokens = int(self.batch["responses"].lengths[column.lengths > 0].sum(dtype=np.int64))
        width = len(column.values) // num_tokens if num_tokens else 1
        whole = np.zeros((int(self.response_lengths.sum(dtype=np.int64)), width), column.values.dtype)
        for first, values in zip(self.first_tokens.tolist(), column.rows(), strict=True):
            whole[first : first + len(values) // width] = values.reshape(-1, width)
        if rows is None:
            rows = np.ones(len(self.response_lengths), np.bool_)
        of_rows = whole[np.repeat(rows, self.response_lengths)]
        return Column(of_rows.reshape(-1), self.response_lengths * np.int32(width) * rows)


def whole_rows(batch: Batch) -> NDArray[np.int64]:
    """Returns the number of the whole row of each row of one context, [num_rows] int64: its own if it is whole."""
    if "segment_of" not in batch:
        return np.arange(batch.num_rows)
    return batch["segment_of"].values.astype(np.int64)


def _divided(batch: Batch, segments: Segments, first_tokens: Array) -> Batch:
    """Returns the segments, whose responses begin at `first_tokens`, of a batch of whole rows."""
    responses = batch["responses"]
    ends = first_tokens + segments.ends - segments.begins - segments.contexts
    divided: dict[str, AnyColumn] = {}
    for name, column in batch.columns.items():
        if isinstance(column, Column) and (name == "responses" or spec_of(name).is_of_tokens):
            divided[name] = _tokens_between(column, first_tokens, ends, len(responses.values))
        else:
            divided[name] = column.take(segments.rows)
    divided["prompts"] = _contexts(batch["prompts"], responses, segments, first_tokens)
    divided["segment_of"] = Column(segments.rows.astype(np.int32), np.ones(len(segments.rows), np.int32))
    return Batch(len(segments.rows), divided, trusted=True)


def _tokens_between(column: Column, starts: Array, ends: Array, num_tokens: int) -> Column:
    """Cuts a column of `num_tokens` response tokens, with one value each or several, into ranges of tokens."""
    width = len(column.values) // num_tokens
    parts = [column.values[start * width : end * width] for start, end in zip(starts, ends, strict=True)]
    return Column(np.concatenate(parts), ((ends - starts) * width).astype(np.int32))


def _contexts(prompts: Column, responses: Column, segments: Segments, first_tokens: Array) -> Column:
    """Returns the context of each segment: the prompt of its row, or the response tokens before `first_tokens`."""
    of_rows = prompts.rows()
    contexts = [
        of_rows[row] if is_first else responses.values[first - length : first]
        for row, is_first, length, first in zip(
            segments.rows, segments.is_first, segments.contexts, first_tokens, strict=True
        )
    ]
    return Column.from_rows(contexts, responses.values.dtype)
