"""A batch stream arrives exactly, or is refused with a sentence and uses no memory."""

from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import xxhash

from splitppo.batch import MAX_BATCH_ROWS, Batch, Column, held_bytes
from splitppo.rpc.codec import BatchReceiver, encode_messages, receive_batch
from splitppo.rpc.errors import CorruptBatch, InvalidBatch, LimitExceeded
from splitppo.rpc.wire_format import CHUNK_BYTES
from splitppo.v1 import batch_pb2, worker_pb2
from tests.support.batch_streams import add, encode

SLOT = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=3)
LIMIT = 1 << 30


def small_batch() -> Batch:
    return Batch.from_rows(prompts=[[1, 2], [3]], responses=[[4], [5, 6]], values=[[0.5], [1.5, 2.5]])


def small_header() -> batch_pb2.BatchHeader:
    return encode(small_batch(), SLOT)[0]


def batch_of_bytes(num_bytes: int) -> Batch:
    values = np.arange(num_bytes // 4, dtype=np.int32)
    return Batch(1, {"prompts": Column(values, np.array([len(values)], np.int32))})


def chunk(offset: int, payload: bytes) -> batch_pb2.BatchChunk:
    return batch_pb2.BatchChunk(offset=offset, payload=payload, checksum=xxhash.xxh3_64_intdigest(payload))


def test_header_says_slot_rows_columns_and_size() -> None:
    header = small_header()

    assert header.slot == SLOT
    assert (header.num_rows, header.total_bytes) == (2, 3 * 4 + 3 * 4 + 3 * 4)
    assert [(spec.name, spec.dtype, list(spec.lengths)) for spec in header.columns] == [
        ("prompts", batch_pb2.DTYPE_INT32, [2, 1]),
        ("responses", batch_pb2.DTYPE_INT32, [1, 2]),
        ("values", batch_pb2.DTYPE_FLOAT32, [1, 2]),
    ]


def test_chunks_hold_the_columns_back_to_back_across_column_borders() -> None:
    _, chunks = encode(small_batch(), SLOT)

    (only,) = chunks

    assert only.payload == np.int32([1, 2, 3, 4, 5, 6]).tobytes() + np.float32([0.5, 1.5, 2.5]).tobytes()


@pytest.mark.parametrize(
    ("num_bytes", "sizes"),
    [
        (0, []),
        (CHUNK_BYTES - 4, [CHUNK_BYTES - 4]),
        (CHUNK_BYTES, [CHUNK_BYTES]),
        (CHUNK_BYTES + 4, [CHUNK_BYTES, 4]),
        (3 * CHUNK_BYTES, [CHUNK_BYTES] * 3),
    ],
)
def test_chunks_are_one_mebibyte_and_the_last_one_is_what_is_left(num_bytes: int, sizes: list[int]) -> None:
    batch = batch_of_bytes(num_bytes)
    header, chunks = encode(batch, SLOT)
    receiver = BatchReceiver(header, LIMIT)
    seen = []
    for part in chunks:
        seen.append(len(part.payload))
        add(receiver, part)

    assert seen == sizes
    np.testing.assert_array_equal(receiver.finish()["prompts"].values, batch["prompts"].values)


def test_strided_values_are_sent_as_their_own_values_only() -> None:
    values = np.arange(10, dtype=np.int32)[::2]
    header, chunks = encode(Batch(1, {"prompts": Column(values, np.array([5], np.int32))}), SLOT)
    receiver = BatchReceiver(header, LIMIT)
    add(receiver, *chunks)

    assert receiver.finish()["prompts"].values.tolist() == [0, 2, 4, 6, 8]


def test_received_columns_are_writable_and_share_no_memory() -> None:
    header, chunks = encode(small_batch(), SLOT)
    receiver = BatchReceiver(header, LIMIT)
    add(receiver, *chunks)
    received = receiver.finish()

    received["prompts"].values[:] = 0

    assert received["responses"].values.tolist() == [4, 5, 6]


@pytest.mark.parametrize("columns", [{}, {"mini_batches": [[0]]}])
def test_a_batch_without_wire_columns_cannot_be_encoded(columns: dict[str, list[list[int]]]) -> None:
    batch = Batch.from_rows(**columns) if columns else Batch(1, {})

    with pytest.raises(ValueError, match=r"at least one column|'mini_batches' is used inside a group only"):
        encode(batch, SLOT)


def no_columns(header: batch_pb2.BatchHeader) -> None:
    del header.columns[:]


def wrong_dtype(header: batch_pb2.BatchHeader) -> None:
    header.columns[2].dtype = batch_pb2.DTYPE_INT32


def unheard_of_dtype(header: batch_pb2.BatchHeader) -> None:
    header.columns[0].dtype = 77  # type: ignore[assignment]


def unknown_column(header: batch_pb2.BatchHeader) -> None:
    header.columns[0].name = "secrets"


def inner_column(header: batch_pb2.BatchHeader) -> None:
    header.columns[0].name = "mini_batches"


def column_twice(header: batch_pb2.BatchHeader) -> None:
    header.columns[1].name = "prompts"


def row_missing(header: batch_pb2.BatchHeader) -> None:
    del header.columns[0].lengths[-1]


def rows_lie(header: batch_pb2.BatchHeader) -> None:
    header.num_rows = 2**32 - 1


def misaligned(header: batch_pb2.BatchHeader) -> None:
    header.columns[2].lengths[:] = [2, 1]


def total_lies(header: batch_pb2.BatchHeader) -> None:
    header.total_bytes += 1


def lengths_lie(header: batch_pb2.BatchHeader) -> None:
    header.columns[0].lengths[0] = 2**31 - 1


def row_too_long(header: batch_pb2.BatchHeader) -> None:
    header.columns[0].lengths[0] = 2**32 - 1


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (no_columns, "a batch needs at least one column"),
        (wrong_dtype, "column 'values' must be DTYPE_FLOAT32, got DTYPE_INT32"),
        (unheard_of_dtype, "column 'prompts' must be DTYPE_INT32, got 77"),
        (unknown_column, "unknown column 'secrets'; known: advantages, begun_log_probs"),
        (inner_column, "unknown column 'mini_batches'"),
        (column_twice, "column 'prompts' is given twice"),
        (row_missing, "column 'prompts' has 1 row lengths, the batch has 2 rows"),
        (rows_lie, "column 'prompts' has 2 row lengths, the batch has 4294967295 rows"),
        (misaligned, "column 'values' must have one value per response token"),
        (total_lies, "total_bytes is 37, but the row lengths add up to 36 bytes"),
        (lengths_lie, "total_bytes is 36, but the row lengths add up to 8589934616 bytes"),
        (row_too_long, "column 'prompts' has a row of 4294967295 values"),
    ],
)
def test_a_header_that_breaks_the_schema_or_contradicts_itself_is_refused(
    spoil: Callable[[batch_pb2.BatchHeader], None], sentence: str
) -> None:
    header = small_header()
    spoil(header)

    with pytest.raises(InvalidBatch, match=sentence):
        BatchReceiver(header, LIMIT)


# Shared columns.


def images_batch() -> Batch:
    return Batch.from_rows(prompts=[[1], [2], [3]], images=[[7, 8], [9], [7, 8]])


def test_rows_that_are_shared_are_sent_once() -> None:
    header, chunks = encode(images_batch(), SLOT)

    assert [(spec.name, list(spec.lengths), list(spec.stored_rows)) for spec in header.columns] == [
        ("prompts", [1, 1, 1], []),
        ("images", [2, 1], [0, 1, 0]),
    ]
    assert header.total_bytes == 12 + 3
    assert next(chunks).payload[12:] == bytes([7, 8, 9])


def test_stored_rows_that_are_not_in_use_are_not_sent() -> None:
    header, chunks = encode(images_batch().take(np.array([1, 1])), SLOT)
    receiver = BatchReceiver(header, LIMIT)
    add(receiver, *chunks)
    received = receiver.finish()["images"]

    assert (list(header.columns[1].lengths), list(header.columns[1].stored_rows)) == ([1], [0, 0])
    assert received.store.num_rows == 1
    assert [row.tolist() for row in received.rows()] == [[9], [9]]


def shared_and_is_none(header: batch_pb2.BatchHeader) -> None:
    header.columns[0].stored_rows[:] = [0, 1, 2]


def not_shared(header: batch_pb2.BatchHeader) -> None:
    del header.columns[1].stored_rows[:]


def not_stored(header: batch_pb2.BatchHeader) -> None:
    header.columns[1].stored_rows[2] = 2


def not_stored_by_far(header: batch_pb2.BatchHeader) -> None:
    header.columns[1].stored_rows[0] = 2**32 - 1


def stored_and_unused(header: batch_pb2.BatchHeader) -> None:
    header.columns[1].stored_rows[:] = [0, 0, 0]


def nothing_stored(header: batch_pb2.BatchHeader) -> None:
    del header.columns[1].lengths[:]


def more_stored_than_rows(header: batch_pb2.BatchHeader) -> None:
    header.columns[1].lengths.extend([0] * 2)


def row_of_none(header: batch_pb2.BatchHeader) -> None:
    header.columns[1].stored_rows.append(1)


def stored_lengths_lie(header: batch_pb2.BatchHeader) -> None:
    header.columns[1].lengths[0] = 2**31 - 1


def stored_row_too_long(header: batch_pb2.BatchHeader) -> None:
    header.columns[1].lengths[0] = 2**32 - 1


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (shared_and_is_none, "column 'prompts' has stored_rows, and is none that rows share"),
        (not_shared, "column 'images' has 0 stored_rows, the batch has 3 rows"),
        (row_of_none, "column 'images' has 4 stored_rows, the batch has 3 rows"),
        (not_stored, "column 'images', row 2: it has no stored row 2, only 2"),
        (not_stored_by_far, "column 'images', row 0: it has no stored row 4294967295, only 2"),
        (nothing_stored, "column 'images', row 0: it has no stored row 0, only 0"),
        (stored_and_unused, "column 'images': no row is its stored row 1"),
        (more_stored_than_rows, "column 'images' stores 4 rows, the batch has 3"),
        (stored_lengths_lie, "total_bytes is 15, but the row lengths add up to 2147483660 bytes"),
        (stored_row_too_long, "column 'images' has a row of 4294967295 values"),
    ],
)
def test_a_header_whose_stored_rows_contradict_it_is_refused(
    spoil: Callable[[batch_pb2.BatchHeader], None], sentence: str
) -> None:
    header, _ = encode(images_batch(), SLOT)
    spoil(header)

    with pytest.raises(InvalidBatch, match=sentence):
        BatchReceiver(header, LIMIT)


def test_too_many_rows_that_are_shared_are_refused() -> None:
    header = batch_pb2.BatchHeader(num_rows=MAX_BATCH_ROWS + 1, total_bytes=1)
    stored_rows = [0] * (MAX_BATCH_ROWS + 1)
    header.columns.add(name="images", dtype=batch_pb2.DTYPE_UINT8, lengths=[1], stored_rows=stored_rows)

    with pytest.raises(LimitExceeded, match="a batch of 131073 rows is over the limit of 131072"):
        BatchReceiver(header, LIMIT)


def test_the_limit_of_a_batch_counts_stored_rows_once() -> None:
    header, _ = encode(images_batch(), SLOT)

    BatchReceiver(header, 15)
    with pytest.raises(LimitExceeded, match="a batch of 15 bytes is over the limit of 14"):
        BatchReceiver(header, 14)


def test_what_is_reserved_is_what_the_batch_will_hold() -> None:
    header, chunks = encode(images_batch(), SLOT)
    reserved: list[int] = []
    receiver = BatchReceiver(header, LIMIT, reserved.append)
    add(receiver, *chunks)

    assert reserved == [held_bytes([receiver.finish()])]


def test_a_batch_over_the_limit_is_refused_before_memory_is_taken() -> None:
    header = batch_pb2.BatchHeader(num_rows=2**16, total_bytes=2**16 * (2**31 - 1) * 4)
    header.columns.add(name="prompts", dtype=batch_pb2.DTYPE_INT32, lengths=[2**31 - 1] * 2**16)

    with pytest.raises(LimitExceeded, match=r"is over the limit of 1000 \(services.max_batch_bytes\)"):
        BatchReceiver(header, 1000)


def test_a_batch_of_exactly_the_limit_is_taken() -> None:
    BatchReceiver(small_header(), 36)


@pytest.mark.parametrize(
    ("chunks", "sentence"),
    [
        ([chunk(4, bytes(4))], "chunk at byte 4 leaves a gap: byte 0 comes next"),
        ([chunk(0, bytes(8)), chunk(4, bytes(8))], "chunk at byte 4 overlaps what was sent before: byte 8 comes next"),
        ([chunk(0, bytes(20)), chunk(20, bytes(17))], "chunk at byte 20 ends beyond the batch's 36 bytes"),
        ([chunk(0, b"")], "a chunk must hold 1 to 1048576 bytes, got 0"),
        ([chunk(0, bytes(CHUNK_BYTES + 1))], "a chunk must hold 1 to 1048576 bytes, got 1048577"),
    ],
)
def test_a_chunk_that_is_not_the_next_piece_is_refused(chunks: list[batch_pb2.BatchChunk], sentence: str) -> None:
    receiver = BatchReceiver(small_header(), LIMIT)
    *good, bad = chunks
    add(receiver, *good)

    with pytest.raises(InvalidBatch, match=sentence):
        add(receiver, bad)


def test_a_chunk_with_another_checksum_is_corrupt() -> None:
    receiver = BatchReceiver(small_header(), LIMIT)
    bad = chunk(0, bytes(36))
    bad.payload = bytes(35) + b"\x01"

    with pytest.raises(CorruptBatch, match="chunk at byte 0: the payload does not have the checksum"):
        add(receiver, bad)


def test_a_truncated_batch_is_refused() -> None:
    receiver = BatchReceiver(small_header(), LIMIT)
    add(receiver, chunk(0, bytes(12)))

    with pytest.raises(InvalidBatch, match="the stream ended after 12 of 36 bytes"):
        receiver.finish()


async def stream(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def test_a_put_is_opened_before_its_batch_is_read() -> None:
    def refuse(header: worker_pb2.PutBatchHeader) -> batch_pb2.BatchHeader:
        raise LookupError(header.run_id)

    opening = worker_pb2.PutBatchRequest(header=worker_pb2.PutBatchHeader(run_id="other"))

    with pytest.raises(LookupError, match="other"):
        await receive_batch(stream(opening.SerializeToString()), LIMIT, refuse)


PUT_HEADER = worker_pb2.PutBatchRequest(header=worker_pb2.PutBatchHeader(batch=small_header())).SerializeToString()
PUT_CHUNK = next(encode_messages(small_batch(), SLOT)[1])


@pytest.mark.parametrize(
    ("messages", "error", "sentence"),
    [
        ([], InvalidBatch, "the stream ended before its header"),
        ([PUT_CHUNK, PUT_HEADER], InvalidBatch, "a batch stream begins with its header"),
        ([PUT_HEADER, PUT_CHUNK, PUT_HEADER], InvalidBatch, "a batch stream has one header, got a second one"),
        ([PUT_HEADER, b""], InvalidBatch, "got an empty message"),
        ([PUT_HEADER, PUT_CHUNK[:-1]], InvalidBatch, r"the message is not a splitppo\.v1\.PutBatchRequest"),
        ([PUT_HEADER, PUT_CHUNK[:-1] + b"!"], CorruptBatch, "chunk at byte 0: the payload does not have the checksum"),
        ([PUT_HEADER, PUT_CHUNK, PUT_CHUNK], InvalidBatch, "chunk at byte 0 overlaps what was sent before"),
        ([PUT_HEADER], InvalidBatch, "the stream ended after 0 of 36 bytes"),
    ],
)
async def test_a_stream_that_is_not_a_header_and_then_its_chunks_is_refused(
    messages: list[bytes], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        await receive_batch(stream(*messages), LIMIT, lambda header: header.batch)


async def test_a_chunk_that_another_protobuf_writer_laid_out_is_read_too() -> None:
    _, chunks = encode(small_batch(), SLOT)
    foreign = [worker_pb2.PutBatchRequest(chunk=part).SerializeToString() for part in chunks]

    _, batch = await receive_batch(stream(PUT_HEADER, *foreign), LIMIT, lambda header: header.batch)

    assert foreign != [PUT_CHUNK]
    assert batch["values"].values.tolist() == [0.5, 1.5, 2.5]
