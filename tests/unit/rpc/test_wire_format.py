"""A header is checked before anything is made from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitppo.batch import MAX_BATCH_ROWS, Batch
from splitppo.rpc.codec import WIRE_COLUMNS, BatchReceiver, encode_messages, receive_batch
from splitppo.rpc.errors import LimitExceeded
from splitppo.rpc.wire_format import MAX_HEADER_FIELDS, check_num_fields, divide
from splitppo.v1 import batch_pb2, conversation_pb2, worker_pb2

PATH = (1, 3)


def put(header: batch_pb2.BatchHeader) -> bytes:
    opening = worker_pb2.PutBatchHeader(run_id="r" * 200, epoch=1 << 60, batch=header)
    return worker_pb2.PutBatchRequest(header=opening).SerializeToString()


def test_a_header_of_all_columns_and_many_rows_passes() -> None:
    header = batch_pb2.BatchHeader(num_rows=1000, total_bytes=1 << 60)
    for name in WIRE_COLUMNS:
        header.columns.add(name=name, lengths=[1 << 31] * 1000)
    check_num_fields(put(header), PATH)


def test_a_small_message_of_many_columns_does_not() -> None:
    header = batch_pb2.BatchHeader()
    for _ in range(MAX_HEADER_FIELDS):
        header.columns.add()
    with pytest.raises(LimitExceeded):
        check_num_fields(put(header), PATH)


def test_nor_do_columns_in_headers_that_protobuf_would_merge() -> None:
    header = batch_pb2.BatchHeader()
    header.columns.add()
    with pytest.raises(LimitExceeded):
        check_num_fields(put(header) * MAX_HEADER_FIELDS, PATH)


def test_a_payload_is_not_looked_into() -> None:
    chunk = batch_pb2.BatchChunk(offset=1, payload=bytes([0x1A, 0]) * 1000, checksum=1)
    check_num_fields(worker_pb2.PutBatchRequest(chunk=chunk).SerializeToString(), PATH)


@given(st.binary(max_size=300))
def test_any_bytes_are_counted_or_left_to_protobuf(message: bytes) -> None:
    try:
        check_num_fields(message, PATH)
    except LimitExceeded:
        assert len(message) > MAX_HEADER_FIELDS


def test_groups_hide_no_fields() -> None:
    header = batch_pb2.BatchHeader()
    for _ in range(MAX_HEADER_FIELDS):
        header.columns.add()
    group = bytes([15 << 3 | 3, 15 << 3 | 4])
    message = group + put(header)
    assert len(worker_pb2.PutBatchRequest.FromString(message).header.batch.columns) == MAX_HEADER_FIELDS
    with pytest.raises(LimitExceeded):
        check_num_fields(message, PATH)


async def test_the_receiver_of_a_stream_asks_first() -> None:
    header = batch_pb2.BatchHeader()
    for _ in range(1000):
        header.columns.add()

    async def stream() -> object:
        yield put(header)

    with pytest.raises(LimitExceeded, match="at most 64 fields"):
        await receive_batch(stream(), 1 << 30)  # type: ignore[arg-type]


async def test_a_chunk_over_its_bound_is_refused_before_it_is_read() -> None:
    header, _ = encode_messages(Batch.from_rows(prompts=[[1] * (1 << 20)]), batch_pb2.Slot())

    async def stream() -> object:
        yield worker_pb2.PutBatchRequest(header=worker_pb2.PutBatchHeader(batch=header)).SerializeToString()
        chunk = batch_pb2.BatchChunk(payload=b"x" * (2 << 20))
        yield worker_pb2.PutBatchRequest(chunk=chunk).SerializeToString()

    with pytest.raises(LimitExceeded, match="is over the limit of"):
        await receive_batch(stream(), 1 << 30, lambda header: header.batch)  # type: ignore[arg-type]


def test_more_rows_than_a_batch_may_have_are_refused() -> None:
    header = batch_pb2.BatchHeader(num_rows=MAX_BATCH_ROWS + 1)
    header.columns.add(name="prompts", dtype=batch_pb2.DTYPE_INT32, lengths=[0] * header.num_rows)
    with pytest.raises(LimitExceeded, match=f"{MAX_BATCH_ROWS + 1} rows is over the limit of {MAX_BATCH_ROWS}"):
        BatchReceiver(header, 1 << 30)


@given(st.lists(st.lists(st.integers(0, 1 << 30), max_size=60), max_size=30), st.integers(10, 400))
def test_messages_are_divided_in_order_and_every_list_fits_unless_one_message_does_not(
    turns: list[list[int]], max_bytes: int
) -> None:
    messages = [conversation_pb2.Turn(tokens=tokens) for tokens in turns]
    lists = list(divide(messages, max_bytes))
    assert [message for some in lists for message in some] == messages
    assert all(lists)
    for some in lists:
        assert len(some) == 1 or conversation_pb2.TurnsEnded(turns=some).ByteSize() <= max_bytes
