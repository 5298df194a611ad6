"""Shared columns have the rows that plain columns would have, and store equal ones once."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from splitppo.batch import Batch, Column, RowStore, SharedColumn, concatenate, held_bytes, in_store_of, join_parts

UINT8 = np.dtype(np.uint8)
Rows = list[list[int]]

# Few different values, so that equal rows are drawn.
rows_of_values = st.lists(st.lists(st.integers(0, 2), max_size=3), max_size=6)


def as_lists(column: SharedColumn) -> Rows:
    return [row.tolist() for row in column.rows()]


@st.composite
def shared(draw: st.DrawFn, stores: Sequence[RowStore] = ()) -> SharedColumn:
    """A column of its own store, or of one of `stores`."""
    stored = Column.from_rows(draw(st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=4)), UINT8)
    store = draw(st.sampled_from([RowStore((stored,)), *stores]))
    numbers = draw(st.lists(st.integers(0, store.num_rows - 1), max_size=6))
    return SharedColumn(store, np.array(numbers, np.int32))


@st.composite
def several(draw: st.DrawFn) -> list[SharedColumn]:
    """Columns of which some have a store in common, or a longer one that begins with it."""
    columns = [draw(shared())]
    for _ in range(draw(st.integers(0, 3))):
        column = draw(shared([one.store for one in columns]))
        columns.append(in_store_of(columns, [column])[0] if draw(st.booleans()) else column)
    return columns


def is_stored_once(column: SharedColumn) -> bool:
    stored = [row.tobytes() for row in column.buffers]
    return len(set(stored)) == len(stored)


@given(rows_of_values)
def test_equal_rows_are_stored_once(rows: Rows) -> None:
    column = SharedColumn.from_rows(rows, UINT8)

    assert as_lists(column) == rows
    assert column.lengths.tolist() == [len(row) for row in rows]
    assert column.store.num_rows == len({tuple(row) for row in rows})
    assert column.num_bytes == sum(len(row) for row in {tuple(row) for row in rows})
    assert is_stored_once(column)


@given(shared(), st.data())
def test_rows_are_taken_as_from_a_list_and_their_store_stays(column: SharedColumn, data: st.DataObject) -> None:
    rows = as_lists(column)
    indices = data.draw(st.lists(st.integers(0, max(0, len(rows) - 1)), max_size=6 if rows else 0))
    start, stop = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 7))

    taken = column.take(np.array(indices, np.int64))
    between = column.between(start, stop)

    assert as_lists(taken) == [rows[index] for index in indices]
    assert as_lists(between) == rows[start:stop]
    assert taken.store is column.store is between.store


@given(several())
def test_columns_come_into_one_store_with_the_rows_that_they_had(columns: list[SharedColumn]) -> None:
    moved = in_store_of(columns, columns)

    assert [as_lists(column) for column in moved] == [as_lists(column) for column in columns]
    assert len({id(column.store) for column in moved}) == 1
    assert any(column.store.is_beginning_of(moved[0].store) for column in columns)


@given(st.lists(rows_of_values, min_size=1, max_size=4))
def test_what_columns_have_in_common_is_stored_once_when_they_are_joined(parts: list[Rows]) -> None:
    batches = [Batch.from_rows(prompts=[[1]] * len(rows), images=rows) for rows in parts]

    joined = concatenate(batches)

    assert as_lists(joined["images"]) == [row for rows in parts for row in rows]
    assert is_stored_once(joined["images"])


@given(rows_of_values, st.randoms(use_true_random=False), st.integers(1, 4))
def test_parts_of_a_batch_become_the_batch_and_nothing_is_copied(rows: Rows, random: object, num_parts: int) -> None:
    whole = Batch.from_rows(places=[[place] for place in range(len(rows))], images=rows)
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    parts = [whole.take(np.array(order[part::num_parts], np.int64)) for part in range(num_parts)]

    joined = join_parts(parts)

    assert as_lists(joined["images"]) == rows
    assert joined["images"].store is whole["images"].store


@given(st.lists(rows_of_values, min_size=1, max_size=4))
def test_batches_that_are_stored_with_others_hold_what_is_different_once(parts: list[Rows]) -> None:
    held: list[Batch] = []
    for rows in parts:
        batch = Batch.from_rows(images=rows, image_sizes=rows)
        held.append(batch.stored_with(held))

    assert [as_lists(batch["images"]) for batch in held] == parts
    assert [as_lists(batch["image_sizes"]) for batch in held] == parts
    stored = {part for batch in held for part in batch["images"].store.parts}
    num_values = sum(len(part.values) for part in stored)
    assert num_values == sum(len(row) for row in {tuple(row) for rows in parts for row in rows})
    num_rows = sum(map(len, parts))
    num_stored = sum(part.num_rows for part in stored)
    assert held_bytes(held) == num_values * (1 + 4) + 2 * 4 * (num_rows + num_stored)
