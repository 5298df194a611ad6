"""Converts batches to and from gRPC streams: a header that describes all columns, then chunks with checksums.

The sender copies the payload once (protobuf takes only `bytes`). The receiver checks the header before it takes memory,
then copies every chunk once, to its final place.
"""

import itertools
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitppo.batch import MAX_BATCH_ROWS, AnyColumn, Array, Batch, SharedColumn, check_stored_rows
from splitppo.columns import COLUMNS, spec_of
from splitppo.rpc.channel_options import MAX_MESSAGE_BYTES
from splitppo.rpc.errors import CorruptBatch, InvalidBatch, LimitExceeded
from splitppo.rpc.wire_format import CHUNK_BYTES, MAX_CHUNK_MESSAGE_BYTES, parse, read_chunk, serialise_chunk
from splitppo.v1 import batch_pb2, worker_pb2

BatchMessage = worker_pb2.PutBatchRequest | worker_pb2.GetBatchResponse

WIRE_COLUMNS = frozenset(name for name, spec in COLUMNS.items() if spec.is_sent)

# The place of the BatchHeader in a message: field numbers from the outside in.
_HEADER_PATH: Mapping[type[BatchMessage], tuple[int, ...]] = {
    worker_pb2.PutBatchRequest: (1, 3),
    worker_pb2.GetBatchResponse: (1,),
}

_WIRE_DTYPES: Mapping[np.dtype[Any], batch_pb2.DType] = {
    np.dtype(np.int32): batch_pb2.DTYPE_INT32,
    np.dtype(np.int64): batch_pb2.DTYPE_INT64,
    np.dtype(np.float32): batch_pb2.DTYPE_FLOAT32,
    np.dtype(np.uint8): batch_pb2.DTYPE_UINT8,
}


def encode_messages(batch: Batch, slot: batch_pb2.Slot) -> tuple[batch_pb2.BatchHeader, Iterator[bytes]]:
    """Converts a batch to its header and an iterator of serialised messages, one for each chunk of the values.

    Each message is made when the stream asks for it. The messages are serialised here: protobuf's own classes would
    copy the payload three times more, at ten times the CPU. The columns must not change until the last chunk is taken.

    Raises:
        ValueError: the batch has no columns, or a column that is never sent.
    """
    if not batch.columns:
        raise ValueError("a batch needs at least one column to be sent")
    if strange := batch.columns.keys() - WIRE_COLUMNS:
        raise ValueError(f"column {min(strange)!r} is used inside a group only and cannot be sent")
    header = batch_pb2.BatchHeader(slot=slot, num_rows=batch.num_rows, total_bytes=batch.num_bytes)
    for name, column in batch.columns.items():
        spec = header.columns.add(name=name, dtype=_WIRE_DTYPES[spec_of(name).dtype])
        if isinstance(column, SharedColumn):
            spec.lengths.extend(column.store.lengths[column.rows_in_use].tolist())
            spec.stored_rows.extend(column.places_in_use.tolist())
        else:
            spec.lengths.extend(column.lengths.tolist())
    return header, itertools.starmap(serialise_chunk, _cut(map(_bytes_of, batch.buffers)))


def _bytes_of(values: Array) -> memoryview:
    return values.view(np.uint8).data


def _cut(views: Iterable[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Cuts joined byte views into chunks of CHUNK_BYTES, the last one shorter; yields (offset, pieces) of each."""
    offset = 0
    filled = 0
    pieces: list[memoryview] = []
    for view in views:
        while view:
            pieces.append(view[: CHUNK_BYTES - filled])
            filled = filled + len(pieces[-1])
            view = view[len(pieces[-1]) :]
            if filled == CHUNK_BYTES:
                yield offset, pieces
                offset = offset + filled
                filled = 0
                pieces = []
    if filled:
        yield offset, pieces


class BatchReceiver:
    """Assembles a batch from its header and its chunks; checks the header before memory is taken.

    `reserve` is called with the number of bytes that the batch needs, before memory is taken; the call may raise.

    Raises:
        InvalidBatch: the header breaks the closed schema or contradicts itself.
        LimitExceeded: the batch has too many rows, or is over `max_bytes`.
    """

    def __init__(
        self, header: batch_pb2.BatchHeader, max_bytes: int, reserve: Callable[[int], None] = lambda _: None
    ) -> None:
        """Checks the header, then reserves and takes memory for all values, to be filled by `add`."""
        self._total_bytes = header.total_bytes
        self._received_bytes = 0
        layout = _check_header(header, max_bytes)
        reserve(header.total_bytes + layout.num_bytes)
        try:
            self._batch = Batch.allocate(header.num_rows, layout.lengths, layout.stored_rows)
        except ValueError as error:
            raise InvalidBatch(str(error)) from error
        # Still to be filled, in the order of the stream.
        self._targets = [_bytes_of(_values_of(column)) for column in self._batch.columns.values()]

    def add(self, offset: int, expected_checksum: int, payload: memoryview) -> None:
        """Checks the next chunk of a batch stream and copies its payload into the batch.

        Raises:
            InvalidBatch: the chunk is empty, too large, not the next one, or reaches beyond the batch.
            CorruptBatch: the payload does not have the chunk's checksum.
        """
        if not 0 < len(payload) <= CHUNK_BYTES:
            raise InvalidBatch(f"a chunk must hold 1 to {CHUNK_BYTES} bytes, got {len(payload)}")
        if offset != self._received_bytes:
            fault = "leaves a gap" if offset > self._received_bytes else "overlaps what was sent before"
            raise InvalidBatch(f"chunk at byte {offset} {fault}: byte {self._received_bytes} comes next")
        if offset + len(payload) > self._total_bytes:
            raise InvalidBatch(f"chunk at byte {offset} ends beyond the batch's {self._total_bytes} bytes")
        if xxhash.xxh3_64_intdigest(payload) != expected_checksum:
            raise CorruptBatch(f"chunk at byte {offset}: the payload does not have the checksum sent with it")
        self._received_bytes += len(payload)
        while payload:
            target = self._targets[0]
            taken = min(len(target), len(payload))
            target[:taken] = payload[:taken]
            payload = payload[taken:]
            self._targets[0] = target[taken:]
            if taken == len(target):
                self._targets.pop(0)

    def finish(self) -> Batch:
        """Returns the complete batch; raises InvalidBatch if bytes of it have not been received."""
        if self._received_bytes != self._total_bytes:
            raise InvalidBatch(f"the stream ended after {self._received_bytes} of {self._total_bytes} bytes")
        return self._batch


def _values_of(column: AnyColumn) -> Array:
    """Returns the array into which the values of a column are received; those of a shared one are in one part."""
    return column.store.parts[0].values if isinstance(column, SharedColumn) else column.values


@dataclass(frozen=True)
class _Layout:
    """The columns of a batch as its header describes them, in its order.

    Attributes:
        lengths: the row lengths of each column, of a shared one those of its stored rows.
        stored_rows: of each shared column, the number of the stored row that each row is.
    """

    lengths: Mapping[str, NDArray[np.int32]]
    stored_rows: Mapping[str, NDArray[np.int32]]

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return sum(numbers.nbytes for numbers in (*self.lengths.values(), *self.stored_rows.values()))


def _check_header(header: batch_pb2.BatchHeader, max_bytes: int) -> _Layout:
    """Checks a batch header and returns what it says of the columns."""
    if not header.columns:
        raise InvalidBatch("a batch needs at least one column")
    lengths: dict[str, NDArray[np.int32]] = {}
    stored_rows: dict[str, NDArray[np.int32]] = {}
    column_bytes = 0
    for spec in header.columns:
        if spec.name in lengths:
            raise InvalidBatch(f"column {spec.name!r} is given twice")
        lengths[spec.name] = _check_column(spec, header.num_rows)
        if spec_of(spec.name).is_shared:
            stored_rows[spec.name] = _check_stored_rows(spec)
        column_bytes += int(lengths[spec.name].sum(dtype=np.int64)) * spec_of(spec.name).dtype.itemsize
    if column_bytes != header.total_bytes:
        raise InvalidBatch(f"total_bytes is {header.total_bytes}, but the row lengths add up to {column_bytes} bytes")
    if column_bytes > max_bytes:
        raise LimitExceeded(
            f"a batch of {column_bytes} bytes is over the limit of {max_bytes} (services.max_batch_bytes)"
        )
    return _Layout(lengths, stored_rows)


def _check_column(spec: batch_pb2.ColumnSpec, num_rows: int) -> NDArray[np.int32]:
    """Checks one column of a header against the closed schema, and returns its row lengths: [num_rows] unless shared.

    Raises:
        InvalidBatch: name, dtype or row lengths are not those of a column that can be sent.
        LimitExceeded: there are too many rows.
    """
    if spec.name not in WIRE_COLUMNS:
        raise InvalidBatch(f"unknown column {spec.name!r}; known: {', '.join(sorted(WIRE_COLUMNS))}")
    expected = _WIRE_DTYPES[spec_of(spec.name).dtype]
    if spec.dtype != expected:
        names = batch_pb2.DType.DESCRIPTOR.values_by_number
        got = names[spec.dtype].name if spec.dtype in names else spec.dtype
        raise InvalidBatch(f"column {spec.name!r} must be {names[expected].name}, got {got}")
    _check_num_rows(spec, num_rows)
    lengths = np.array(spec.lengths, dtype=np.int64)
    if lengths.max(initial=0) > np.iinfo(np.int32).max:
        raise InvalidBatch(f"column {spec.name!r} has a row of {lengths.max()} values, more than a row can hold")
    return lengths.astype(np.int32)


def _check_num_rows(spec: batch_pb2.ColumnSpec, num_rows: int) -> None:
    """Raises InvalidBatch unless a column has as many rows as the batch, LimitExceeded if those are too many.

    Of a shared column these are the numbers of stored rows, of which there are at most as many.
    """
    if spec_of(spec.name).is_shared:
        if len(spec.stored_rows) != num_rows:
            rows = f"{len(spec.stored_rows)} stored_rows, the batch has {num_rows} rows"
            raise InvalidBatch(f"column {spec.name!r} has {rows}")
        if len(spec.lengths) > num_rows:
            raise InvalidBatch(f"column {spec.name!r} stores {len(spec.lengths)} rows, the batch has {num_rows}")
    else:
        if spec.stored_rows:
            raise InvalidBatch(f"column {spec.name!r} has stored_rows, and is none that rows share")
        if len(spec.lengths) != num_rows:
            rows = f"{len(spec.lengths)} row lengths, the batch has {num_rows} rows"
            raise InvalidBatch(f"column {spec.name!r} has {rows}")
    if num_rows > MAX_BATCH_ROWS:
        raise LimitExceeded(f"a batch of {num_rows} rows is over the limit of {MAX_BATCH_ROWS}")


def _check_stored_rows(spec: batch_pb2.ColumnSpec) -> NDArray[np.int32]:
    """Returns the number of the stored row that each row of a shared column is, [num_rows].

    Raises:
        InvalidBatch: a row is none of the stored rows, or a stored row is none of the rows.
    """
    num_stored = len(spec.lengths)
    stored_rows = np.array(spec.stored_rows, dtype=np.int64)
    try:
        check_stored_rows(spec.name, stored_rows, num_stored)
    except ValueError as error:
        raise InvalidBatch(str(error)) from error
    unused = np.flatnonzero(np.bincount(stored_rows, minlength=num_stored) == 0)
    if len(unused):
        raise InvalidBatch(f"column {spec.name!r}: no row is its stored row {unused[0]}")
    return stored_rows.astype(np.int32)


async def receive_batch(
    messages: AsyncIterable[bytes],
    max_bytes: int,
    open_header: Callable[[Any], batch_pb2.BatchHeader] = lambda header: header,
    message_type: type[BatchMessage] = worker_pb2.PutBatchRequest,
    reserve: Callable[[int], None] = lambda _: None,
) -> tuple[batch_pb2.Slot, Batch]:
    """Receives a whole batch stream, one header and then chunks, and returns (slot of the header, batch).

    `messages` are serialised: protobuf's classes would copy the payload twice more. `open_header` checks the message
    around the batch's header (PutBatchHeader) and returns the header; `reserve` as for BatchReceiver. The header is
    released before the first chunk: it is as large as the row lengths, and would stay in memory with a slow sender.

    Raises:
        InvalidBatch, CorruptBatch, LimitExceeded: the stream is malformed or too large; whatever `open_header` raises.
    """
    receiver = None
    slot = batch_pb2.Slot()
    async for serialised in messages:
        if receiver is not None and (chunk := read_chunk(serialised)) is not None:
            receiver.add(*chunk)
            continue
        most = MAX_MESSAGE_BYTES if receiver is None else MAX_CHUNK_MESSAGE_BYTES
        message = parse(serialised, message_type, most, header_path=_HEADER_PATH[message_type], malformed=InvalidBatch)
        kind = message.WhichOneof("part")
        if kind == "header":
            if receiver is not None:
                raise InvalidBatch("a batch stream has one header, got a second one")
            header = open_header(message.header)
            receiver = BatchReceiver(header, max_bytes, reserve)
            slot.CopyFrom(header.slot)
            del header
        elif receiver is None:
            raise InvalidBatch("a batch stream begins with its header")
        elif kind == "chunk":
            receiver.add(message.chunk.offset, message.chunk.checksum, memoryview(message.chunk.payload))
        else:
            raise InvalidBatch("a batch stream holds a header and chunks, got an empty message")
        del message, serialised
    if receiver is None:
        raise InvalidBatch("the stream ended before its header")
    return slot, receiver.finish()
