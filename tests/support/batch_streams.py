"""Batches on the wire as plain protobuf messages, as a client in another language would make them."""

from __future__ import annotations

from collections.abc import Iterator

from splitppo.batch import Batch
from splitppo.rpc.codec import BatchReceiver, encode_messages
from splitppo.v1 import batch_pb2, worker_pb2


def encode(batch: Batch, slot: batch_pb2.Slot) -> tuple[batch_pb2.BatchHeader, Iterator[batch_pb2.BatchChunk]]:
    """Returns the header of a batch and its chunks."""
    header, messages = encode_messages(batch, slot)
    return header, (worker_pb2.PutBatchRequest.FromString(message).chunk for message in messages)


def add(receiver: BatchReceiver, *chunks: batch_pb2.BatchChunk) -> None:
    """Adds chunks to a receiver."""
    for chunk in chunks:
        receiver.add(chunk.offset, chunk.checksum, memoryview(chunk.payload))
