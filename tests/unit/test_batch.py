"""Ragged columns and batches: accepted values; padding, taking and merging rows."""

import numpy as np
import pytest

from splitppo.batch import Batch, Column, RowStore, SharedColumn, concatenate, held_bytes
from splitppo.columns import COLUMNS, spec_of

INT32 = np.dtype(np.int32)


def column(*rows: list[int]) -> Column:
    return Column.from_rows(rows, INT32)


def as_lists(column: Column) -> list[list[float]]:
    return [row.tolist() for row in column.rows()]


# Columns.


def test_rows_are_stored_back_to_back() -> None:
    ragged = column([1, 2], [], [3])

    assert ragged.values.tolist() == [1, 2, 3]
    assert ragged.lengths.tolist() == [2, 0, 1]
    assert ragged.offsets.tolist() == [0, 2, 2, 3]


@pytest.mark.parametrize("rows", [[], [[]], [[], []], [[1]], [[1, 2], [], [3, 4, 5]], [[], [1], []]])
def test_rows_come_back_as_they_were_given(rows: list[list[int]]) -> None:
    assert as_lists(column(*rows)) == rows


def test_rows_are_views() -> None:
    ragged = column([1, 2], [3])

    ragged.rows()[1][0] = 9

    assert ragged.values.tolist() == [1, 2, 9]


def test_padding_fills_with_zeros_on_the_right() -> None:
    assert column([1, 2, 4], [], [3]).pad().tolist() == [[1, 2, 4], [0, 0, 0], [3, 0, 0]]


def test_the_width_is_the_longest_row() -> None:
    assert column([1], [2, 3]).pad().shape == (2, 2)
    assert column([], []).pad().shape == (2, 0)
    assert column().pad().shape == (0, 0)


def test_the_mask_is_true_where_a_row_has_values() -> None:
    assert column([0, 0], [], [0]).mask().tolist() == [[True, True], [False, False], [True, False]]


def test_unpadding_takes_the_values_inside_the_mask_with_their_own_dtype() -> None:
    ragged = column([1, 2], [], [3])

    unpadded = ragged.unpad(np.array([[0.1, 0.2], [9, 9], [0.3, 9]], np.float32))

    assert unpadded.values.tolist() == np.float32([0.1, 0.2, 0.3]).tolist()
    assert unpadded.lengths.tolist() == [2, 0, 1]


def test_taking_rows_reorders_repeats_and_drops() -> None:
    ragged = column([1, 2], [], [3], [4, 5, 6])

    assert as_lists(ragged.take(np.array([3, 0, 0, 1]))) == [[4, 5, 6], [1, 2], [1, 2], []]
    assert as_lists(ragged.take(np.array([], np.int64))) == []


# Batches.


def test_rows_may_go_on_with_those_of_another_column() -> None:
    first = Column.from_rows([[1], [], [2, 3]], np.dtype(np.int64))
    second = Column.from_rows([[4, 5], [6], []], np.dtype(np.int64))
    assert [row.tolist() for row in first.followed_by(second).rows()] == [[1, 4, 5], [6], [2, 3]]
    none = Column.from_rows([], np.dtype(np.int32))
    assert none.followed_by(none).values.dtype == np.int32


def test_a_batch_of_lists_has_the_dtypes_of_the_table() -> None:
    batch = Batch.from_rows(**{name: [[1]] for name in COLUMNS})

    assert {name: batch[name].rows()[0].dtype for name in COLUMNS} == {
        name: spec.dtype for name, spec in COLUMNS.items()
    }


def test_its_size_counts_values_only() -> None:
    assert Batch.from_rows(prompts=[[1, 2], [3]], seeds=[[1], []], response_mask=[[1], [1]]).num_bytes == 12 + 8 + 2


def test_an_unknown_column_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown column 'reward'; known: prompts, images"):
        Batch.from_rows(reward=[[1]])
    with pytest.raises(ValueError, match=r"unknown column 'reward'"):
        Batch(1, {"reward": column([1])})


@pytest.mark.parametrize("values", [np.zeros(2, np.int64), np.zeros((2, 1), np.int32), np.zeros(2, ">i4")])
def test_values_of_another_dtype_or_shape_are_refused(values: np.ndarray) -> None:
    with pytest.raises(ValueError, match="column 'prompts' must be 1-dimensional int32, got"):
        Batch(1, {"prompts": Column(values, np.array([2], np.int32))})


def test_columns_of_different_numbers_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="column 'responses' has 1 rows, the batch has 2"):
        Batch.from_rows(prompts=[[1], [2]], responses=[[1]])


@pytest.mark.parametrize("lengths", [[1, 2], [3, 2], [5, -1]])
def test_lengths_that_do_not_add_up_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="column 'prompts': its row lengths do not add up to its 4 values"):
        Batch(2, {"prompts": Column(np.zeros(4, np.int32), np.array(lengths, np.int32))})


# A row of two response tokens, then one of one: rows of columns that do not fit them.
WRONG_ROWS = {
    "one_per_row": ("one value per row", [[0], []]),
    "per_token": ("one value per response token", [[0], [0, 0]]),
    "several_per_token": ("equally many values per response token", [[0, 0, 0], [0, 0, 0]]),
}


@pytest.mark.parametrize("name", sorted(name for name, spec in COLUMNS.items() if spec.kind in WRONG_ROWS))
def test_a_column_has_as_many_values_as_its_kind_says(name: str) -> None:
    how_many, rows = WRONG_ROWS[COLUMNS[name].kind]
    with pytest.raises(ValueError, match=f"column '{name}' must have {how_many}"):
        Batch.from_rows(responses=[[1, 2], [3]], **{name: rows})


def test_a_new_column_is_not_guessed_to_be_one_of_tokens() -> None:
    with pytest.raises(ValueError, match=r"^unknown column 'reward_of_token'; known: .* \(splitppo/columns\.py\)$"):
        spec_of("reward_of_token")


def test_selecting_keeps_only_the_named_columns() -> None:
    batch = Batch.from_rows(prompts=[[1]], responses=[[2]])

    assert list(batch.select(["responses"]).columns) == ["responses"]
    assert "prompts" in batch
    with pytest.raises(KeyError, match="the batch has no column 'values', it has prompts, responses"):
        batch.select(["values"])


def test_merging_adds_and_replaces_columns() -> None:
    batch = Batch.from_rows(prompts=[[1]], responses=[[2]])

    merged = batch.merge(Batch.from_rows(responses=[[3, 4]], values=[[0.5, 0.5]]))

    assert as_lists(merged["prompts"]) == [[1]]
    assert as_lists(merged["responses"]) == [[3, 4]]
    assert as_lists(merged["values"]) == [[0.5, 0.5]]


def test_merging_checks_rows_and_alignment() -> None:
    batch = Batch.from_rows(responses=[[2]])

    with pytest.raises(ValueError, match="cannot merge a batch of 2 rows into one of 1"):
        batch.merge(Batch.from_rows(values=[[1.0], [1.0]]))
    with pytest.raises(ValueError, match="'values' must have one value per response token"):
        batch.merge(Batch.from_rows(values=[[1.0, 2.0]]))


def test_taking_rows_of_a_batch_takes_them_of_every_column() -> None:
    batch = Batch.from_rows(prompts=[[1], [2, 2]], responses=[[], [5]]).take(np.array([1, 0, 1]))

    assert batch.num_rows == 3
    assert as_lists(batch["prompts"]) == [[2, 2], [1], [2, 2]]
    assert as_lists(batch["responses"]) == [[5], [], [5]]


def test_concatenating_puts_the_rows_of_one_batch_after_those_of_the_other() -> None:
    first, second = Batch.from_rows(prompts=[[1], []]), Batch.from_rows(prompts=[[2, 3]])

    joined = concatenate([first, second, first])

    assert joined.num_rows == 5
    assert as_lists(joined["prompts"]) == [[1], [], [2, 3], [1], []]


def test_concatenating_different_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot concatenate batches with different columns"):
        concatenate([Batch.from_rows(prompts=[[1]]), Batch.from_rows(responses=[[1]])])


def test_neighbouring_rows_are_views() -> None:
    ragged = column([1, 2], [], [3], [4, 5])
    middle = ragged.between(1, 3)
    assert [row.tolist() for row in middle.rows()] == [[], [3]]
    assert np.shares_memory(middle.values, ragged.values)
    assert ragged.between(2, 9).lengths.tolist() == [1, 2]
    assert ragged.between(2, 2).num_rows == 0


def test_each_row_is_summed() -> None:
    assert column([1, 2], [], [3], []).sums().tolist() == [3, 0, 3, 0]
    assert column([], []).sums().tolist() == [0, 0]


@pytest.mark.parametrize("length", [2, 300])  # by position, and row by row
def test_rows_are_taken_in_any_order_and_may_repeat(length: int) -> None:
    rows = [np.arange(length), np.arange(0), np.arange(length) + length]
    taken = Column.from_rows(rows, np.dtype(np.int32)).take(np.array([2, 1, 0, 2]))
    for row, expected in zip(taken.rows(), (rows[2], rows[1], rows[0], rows[2]), strict=True):
        np.testing.assert_array_equal(row, expected)


# Shared columns.


def images(*rows: list[int]) -> Batch:
    return Batch.from_rows(images=list(rows))


def test_a_shared_column_is_one_by_its_name_alone() -> None:
    plain = Column.from_rows([[1]], np.dtype(np.uint8))
    with pytest.raises(ValueError, match="column 'images' must be shared"):
        Batch(1, {"images": plain})
    with pytest.raises(ValueError, match="column 'response_mask' must not be shared"):
        Batch(1, {"response_mask": SharedColumn.from_rows([[1]], np.dtype(np.uint8))})


@pytest.mark.parametrize("stored_row", [-1, 2])
def test_a_row_that_is_not_stored_is_refused(stored_row: int) -> None:
    store = RowStore((Column.from_rows([[1], [2]], np.dtype(np.uint8)),))
    with pytest.raises(ValueError, match=f"column 'images', row 1: it has no stored row {stored_row}, only 2"):
        Batch(2, {"images": SharedColumn(store, np.array([0, stored_row], np.int32))})


def test_stored_values_are_checked_as_others_are() -> None:
    store = RowStore((Column.from_rows([[1]], np.dtype(np.uint8)), Column.from_rows([[1]], INT32)))
    with pytest.raises(ValueError, match="column 'images' must be 1-dimensional uint8, got int32"):
        Batch(1, {"images": SharedColumn(store, np.zeros(1, np.int32))})


def test_the_size_of_shared_rows_counts_those_in_use_once() -> None:
    batch = images([1, 2, 3], [4], [1, 2, 3])

    assert batch.num_bytes == 4
    assert batch.take(np.array([1, 1])).num_bytes == 1
    assert batch.take(np.array([0, 2])).num_bytes == 3
    assert [row.tolist() for row in batch.take(np.array([2, 0])).buffers] == [[1, 2, 3]]


def test_what_is_held_counts_a_store_once() -> None:
    batch = images([1, 2, 3], [4], [1, 2, 3])

    parts = [batch.take(np.array([0])), batch.take(np.array([1, 2]))]

    assert held_bytes([batch]) == 4 + 4 * (2 + 3)
    assert held_bytes([batch, *parts]) == 4 + 4 * (2 + 3 + 1 + 2)


def test_joining_copies_what_a_store_lacks_and_nothing_else() -> None:
    first = images([1, 1], [2])
    second = images([2], [3, 3])

    joined = concatenate([first, second])["images"]

    assert [row.tolist() for row in joined.rows()] == [[1, 1], [2], [2], [3, 3]]
    assert joined.store.parts[0] is first["images"].store.parts[0]
    assert joined.store.parts[1].values.tolist() == [3, 3]


def test_rows_of_a_file_that_is_mapped_are_not_copied() -> None:
    values = np.frombuffer(bytes(range(100)), np.uint8)  # read-only, as a mapped file
    store = RowStore((Column(values, np.full(10, 10, np.int32)),))
    batch = Batch(3, {"images": SharedColumn(store, np.array([7, 2, 7], np.int32))})

    taken = concatenate([batch.take(np.array([0, 1])), batch.between(2, 3)])

    assert all(np.shares_memory(row, values) for row in (*taken["images"].rows(), *taken.buffers))
    assert [row[0] for row in taken["images"].rows()] == [70, 20, 70]
