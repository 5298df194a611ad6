"""Contexts that begin anew inside a response: what the column `segments` says, and how rows divide by it.

    row       = prompt ++ response
    response  = [turn][reply][turn] [context 1][turn][reply][turn] [context 2][turn]
    segments  = [segment 0        ] [segment 1                   ] [segment 2      ]

A row has one context for its first segment, the prompt, and one for each later segment: the first tokens of that
segment, which are not sampled, and stand in the response like those of a reply. What is sampled in a segment sees the
segment's context and the tokens after it, and nothing before. A row without later segments has none in the column, and
so have all rows of a batch without the column.

The column `privileged_tokens` is a value model's alone: it reads them before the prompt and before the context of each
later segment. They are in no response, so that what is said of response tokens holds with them and without.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from splitppo.batch import Batch, Column

_VALUES_EACH = 2  # of a later segment in the column: where its context begins in the response, and its tokens


@dataclass(frozen=True, eq=False)
class Segments:
    """All segments of rows, one after the other in the order of rows; arrays of [num_segments] int64.

    Attributes:
        rows: the row of each segment.
        begins: the token of the response with which the segment begins, and the context of a later one.
        contexts: how many tokens of the response are the segment's context: 0 for the first one of a row, which has the
            prompt.
        ends: the token of the response before which the segment ends.
    """

    rows: NDArray[np.int64]
    begins: NDArray[np.int64]
    contexts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Reads the column `segments` of a batch with `responses`; without the column a row is one segment.

        Raises:
            ValueError: a row has an odd number of values, contexts do not begin in ascending order inside the response,
                or a context has no token, or more tokens than its segment.
        """
        responses = batch["responses"]
        later = later_segments(batch)
        _check_pairs(later)
        num_segments = num_contexts(later)
        rows = np.repeat(np.arange(len(num_segments)), num_segments)
        first_of_rows = np.cumsum(num_segments) - num_segments
        last_of_rows = first_of_rows + num_segments - 1
        is_later = np.ones(len(rows), np.bool_)
        is_later[first_of_rows] = False
        begins = np.zeros(len(rows), np.int64)
        contexts = np.zeros(len(rows), np.int64)
        begins[is_later] = later.values[::_VALUES_EACH]
        contexts[is_later] = later.values[1::_VALUES_EACH]
        ends = np.append(begins[1:], 0)
        ends[last_of_rows] = responses.lengths
        segments = cls(rows, begins, contexts, ends)
        segments._check(responses.lengths)
        return segments

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """[num_segments] bool: True for the first segment of each row, whose context is the prompt."""
        is_first: NDArray[np.bool_] = np.diff(self.rows, prepend=-1) != 0
        return is_first

    def lengths(self, batch: Batch) -> NDArray[np.int64]:
        """Counts the tokens of each segment, which a model has to hold at once, [num_segments].

        These are its context and what follows, after the privileged tokens of its row if the batch has any.
        """
        lengths: NDArray[np.int64] = np.where(self.is_first, batch["prompts"].lengths[self.rows], 0)
        if "privileged_tokens" in batch:
            lengths += batch["privileged_tokens"].lengths[self.rows]
        return lengths + self.ends - self.begins

    def _check(self, response_lengths: NDArray[np.int32]) -> None:
        """Raises ValueError for the first later segment that does not lie in its row as the class says."""
        is_later = ~self.is_first
        follows_later = np.append(False, is_later[:-1]) & is_later
        is_ascending = ~follows_later | (np.diff(self.begins, prepend=0) > 0)
        is_inside = (self.begins >= 0) & (self.begins < response_lengths[self.rows])
        for segment in np.flatnonzero(is_later & ~(is_ascending & is_inside)):
            row = self.rows[segment]
            raise ValueError(
                f"column 'segments', row {row}: expected contexts that begin in ascending order in a response of"
                f" {response_lengths[row]} tokens, got one that begins at {self.begins[segment]}"
            )
        num_tokens = self.ends - self.begins
        for segment in np.flatnonzero(is_later & ((self.contexts < 1) | (self.contexts > num_tokens))):
            raise ValueError(
                f"column 'segments', row {self.rows[segment]}: expected a context of 1 to {num_tokens[segment]} tokens,"
                f" those of the segment that begins at {self.begins[segment]}, got {self.contexts[segment]}"
            )


def later_segments(batch: Batch) -> Column:
    """Returns the column `segments` of a batch; without it, one in which no row has later segments."""
    if "segments" in batch:
        return batch["segments"]
    return Column(np.empty(0, np.int32), np.zeros(batch.num_rows, np.int32))


def num_contexts(segments: Column) -> NDArray[np.int64]:
    """Counts the contexts of each row, the prompt included: 1 for each row without later segments; [num_rows] int64."""
    return 1 + segments.lengths.astype(np.int64) // _VALUES_EACH


def context_tokens(segments: Column) -> NDArray[np.int64]:
    """Counts the tokens of each response that are contexts of later segments, [num_rows] int64."""
    of_contexts = segments.values.copy()
    of_contexts[::_VALUES_EACH] = 0
    return Column(of_contexts, segments.lengths).sums().astype(np.int64)


def _check_pairs(segments: Column) -> None:
    """Raises ValueError unless each row has two values for each later segment."""
    odd = np.flatnonzero(segments.lengths % _VALUES_EACH)
    if len(odd):
        row = int(odd[0])
        raise ValueError(
            f"column 'segments', row {row}: expected two values for each later segment, got {segments.lengths[row]}"
        )
