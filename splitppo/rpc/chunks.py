"""The chunk message, written and read by hand: protobuf's classes copy the payload several times, this copies once.

What is written is plain protobuf, a PutBatchRequest or a GetBatchResponse (both have the chunk in field 2). What is
read is only that very layout; everything else is left to protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

CHUNK_BYTES = 1 << 20

# Field numbers and wire types of batch.proto and worker.proto.
_CHUNK = 0x12  # field 2, length-delimited
_OFFSET = 0x08  # field 1, varint
_CHECKSUM = 0x19  # field 3, fixed64
_PAYLOAD = 0x12  # field 2, length-delimited
_MAX_VARINT_BYTES = 10


def checksum(pieces: Sequence[memoryview]) -> int:
    """xxh3-64 of the pieces, back to back."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def serialise_chunk(offset: int, pieces: Sequence[memoryview]) -> bytes:
    """The message with one chunk; the pieces are copied once, to their place in it."""
    num_bytes = sum(len(piece) for piece in pieces)
    fields = b"".join(
        (
            bytes([_OFFSET]) + _varint(offset),
            bytes([_CHECKSUM]) + checksum(pieces).to_bytes(8, "little"),
            bytes([_PAYLOAD]) + _varint(num_bytes),
        )
    )
    return b"".join((bytes([_CHUNK]), _varint(len(fields) + num_bytes), fields, *pieces))


def read_chunk(message: bytes) -> tuple[int, int, memoryview] | None:
    """(offset, checksum, payload) of a message as `serialise_chunk` writes it; None for any other message."""
    try:
        position = _expect(message, 0, _CHUNK)
        num_chunk_bytes, position = _read_varint(message, position)
        if position + num_chunk_bytes != len(message):
            return None
        offset, position = _read_varint(message, _expect(message, position, _OFFSET))
        position = _expect(message, position, _CHECKSUM)
        digest = int.from_bytes(message[position : position + 8], "little")
        num_bytes, position = _read_varint(message, _expect(message, position + 8, _PAYLOAD))
    except (_OtherLayout, IndexError):
        return None
    return (offset, digest, memoryview(message)[position:]) if position + num_bytes == len(message) else None


class _OtherLayout(Exception):
    """The message is not laid out as we write it."""


def _expect(message: bytes, position: int, tag: int) -> int:
    if message[position] != tag:
        raise _OtherLayout
    return position + 1


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """(number, position behind it)."""
    number = 0
    for index in range(_MAX_VARINT_BYTES):
        digit = message[position + index]
        number |= (digit & 0x7F) << (7 * index)
        if digit <= 0x7F:
            return number, position + index + 1
    raise _OtherLayout
