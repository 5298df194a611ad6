"""Encoding and decoding a batch is the identity."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from splitppo.batch import AnyColumn, Batch, Column, RowStore, SharedColumn
from splitppo.columns import spec_of
from splitppo.rpc.codec import WIRE_COLUMNS, encode_messages, receive_batch
from splitppo.rpc.errors import WireError
from splitppo.rpc.wire_format import checksum, read_chunk, serialise_chunk
from splitppo.v1 import batch_pb2, worker_pb2


@st.composite
def shared_columns(draw: st.DrawFn, dtype: np.dtype[Any], num_rows: int) -> SharedColumn:
    """Any column of rows of a store, which may have equal rows and rows that are not in use."""
    lengths = np.array(draw(st.lists(st.integers(0, 5), min_size=1, max_size=5)), np.int32)
    stored = st.lists(st.integers(0, len(lengths) - 1), min_size=num_rows, max_size=num_rows)
    store = Column(draw(hnp.arrays(dtype, int(lengths.sum()))), lengths)
    return SharedColumn(RowStore((store,)), np.array(draw(stored), np.int32))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Any batch that may travel: any columns, any values (NaN too), empty rows, no rows."""
    num_rows = draw(st.integers(0, 6))
    row_lengths = st.lists(st.integers(0, 9), min_size=num_rows, max_size=num_rows)
    response_lengths = np.array(draw(row_lengths), np.int32)
    columns: dict[str, AnyColumn] = {}
    for name in draw(st.lists(st.sampled_from(sorted(WIRE_COLUMNS)), min_size=1, unique=True)):
        if spec_of(name).is_shared:
            columns[name] = draw(shared_columns(spec_of(name).dtype, num_rows))
            continue
        if spec_of(name).is_of_tokens or name == "responses":
            lengths = response_lengths * np.int32(3 if spec_of(name).kind == "several_per_token" else 1)
        elif spec_of(name).kind == "one_per_row":
            lengths = np.ones(num_rows, np.int32)
        else:
            lengths = np.array(draw(row_lengths), np.int32)
        columns[name] = Column(draw(hnp.arrays(spec_of(name).dtype, int(lengths.sum()))), lengths)
    return Batch(num_rows, columns)


def assert_identical(received: Batch, sent: Batch) -> None:
    assert received.num_rows == sent.num_rows
    assert list(received.columns) == list(sent.columns)
    for name, column in sent.columns.items():
        assert type(received.columns[name]) is type(column)
        assert received[name].lengths.dtype == np.int32
        np.testing.assert_array_equal(received[name].lengths, column.lengths)
        for row, sent_row in zip(received[name].rows(), column.rows(), strict=True):
            assert row.dtype == sent_row.dtype
            assert row.tobytes() == sent_row.tobytes()
        if isinstance(column, SharedColumn):
            assert received.columns[name].store.num_rows == len(set(column.stored_rows.tolist()))


@pytest.mark.promise("groups that exchange messages")
@given(batches())
def test_what_is_received_is_what_was_sent_bit_for_bit(sent: Batch) -> None:
    slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=2**40, part=7)
    header, chunks = encode_messages(sent, slot)

    async def parts() -> AsyncIterator[bytes]:
        yield worker_pb2.GetBatchResponse(header=header).SerializeToString()
        for chunk in chunks:
            yield chunk

    call = receive_batch(parts(), sent.num_bytes, message_type=worker_pb2.GetBatchResponse)
    sent_slot, received = asyncio.run(call)

    assert sent_slot == slot
    assert_identical(received, sent)


offsets = st.integers(0, 2**64 - 1)
pieces = st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=3)


@given(offsets, pieces)
def test_a_chunk_written_by_hand_is_the_protobuf_message(offset: int, written: list[bytes]) -> None:
    views = [memoryview(piece) for piece in written]
    message = serialise_chunk(offset, views)
    chunk = batch_pb2.BatchChunk(offset=offset, payload=b"".join(written), checksum=checksum(views))

    assert worker_pb2.PutBatchRequest.FromString(message) == worker_pb2.PutBatchRequest(chunk=chunk)
    assert worker_pb2.GetBatchResponse.FromString(message) == worker_pb2.GetBatchResponse(chunk=chunk)


@given(offsets, pieces)
def test_a_chunk_read_by_hand_is_what_was_written(offset: int, written: list[bytes]) -> None:
    views = [memoryview(piece) for piece in written]

    assert read_chunk(serialise_chunk(offset, views)) == (offset, checksum(views), b"".join(written))


@given(st.binary(max_size=40), st.data())
def test_what_is_not_laid_out_as_we_write_it_is_left_to_protobuf(noise: bytes, data: st.DataObject) -> None:
    good = serialise_chunk(7, [memoryview(b"payload")])
    position = data.draw(st.integers(0, len(good)))
    for message in (noise, good[:position] + noise, good[:position] + noise + good[position:]):
        read = read_chunk(message)
        if read is not None:
            chunk = worker_pb2.PutBatchRequest.FromString(message).chunk
            assert (read[0] % 2**64, *read[1:]) == (chunk.offset, chunk.checksum, chunk.payload)


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_bytes_are_refused_with_an_error_of_the_wire(messages: list[bytes]) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    try:
        asyncio.run(receive_batch(parts(), 1 << 20, lambda header: header.batch))
    except WireError:
        return
    raise AssertionError("random bytes were taken for a batch")
