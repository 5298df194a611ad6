"""The codec's round trip is the identity."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given
from hypothesis.extra import numpy as hnp

from splitppo.batch import COLUMN_DTYPES, RESPONSE_ALIGNED, Batch, Column
from splitppo.rpc.codec import WIRE_COLUMNS, BatchReceiver, encode
from splitppo.v1 import batch_pb2


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Any batch that may travel: any columns, any values (NaN too), empty rows, no rows."""
    num_rows = draw(st.integers(0, 6))
    row_lengths = st.lists(st.integers(0, 9), min_size=num_rows, max_size=num_rows)
    response_lengths = draw(row_lengths)
    columns = {}
    for name in draw(st.lists(st.sampled_from(sorted(WIRE_COLUMNS)), min_size=1, unique=True)):
        aligned = name in RESPONSE_ALIGNED or name == "responses"
        lengths = np.array(response_lengths if aligned else draw(row_lengths), np.int32)
        columns[name] = Column(draw(hnp.arrays(COLUMN_DTYPES[name], int(lengths.sum()))), lengths)
    return Batch(num_rows, columns)


@given(batches())
def test_what_is_received_is_what_was_sent_bit_for_bit(sent: Batch) -> None:
    slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=2**40, part=7)
    header, chunks = encode(sent, slot)
    wire_header = batch_pb2.BatchHeader.FromString(header.SerializeToString())
    receiver = BatchReceiver(wire_header, max_bytes=sent.num_bytes)
    for chunk in chunks:
        receiver.add(batch_pb2.BatchChunk.FromString(chunk.SerializeToString()))
    received = receiver.finish()

    assert wire_header.slot == slot
    assert received.num_rows == sent.num_rows
    assert list(received.columns) == list(sent.columns)
    for name, column in sent.columns.items():
        assert received[name].values.dtype == column.values.dtype
        assert received[name].values.tobytes() == column.values.tobytes()
        assert received[name].lengths.dtype == np.int32
        np.testing.assert_array_equal(received[name].lengths, column.lengths)
