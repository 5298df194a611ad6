"""Reads and writes protobuf's wire format by hand for chunks of batches, which then are copied only once.

Protobuf's own classes would copy a chunk several times. A chunk is written as plain protobuf, a PutBatchRequest or a
GetBatchResponse (both have the chunk in field 2), and read in exactly this layout. Everything else is left to protobuf.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import xxhash
from google.protobuf.message import DecodeError, Message

from splitppo.rpc.errors import InvalidArgument, LimitExceeded

M = TypeVar("M", bound=Message)

# The most fields of a batch header: run id, epoch and batch; slot, rows, bytes and one entry per column. Repeated
# fields add up.
MAX_HEADER_FIELDS = 64
CHUNK_BYTES = 1 << 20
# The most bytes of a request; those of batches and measurements have limits of their own.
MAX_REQUEST_BYTES = 64 << 10
# A chunk's message is the payload, its checksum, its offset and their tags.
MAX_CHUNK_MESSAGE_BYTES = CHUNK_BYTES + 64
# The most bytes of one MeasureUpload or MeasureDownload.
MAX_MEASURED_BYTES = 64 << 20

# Field numbers and wire types of batch.proto and worker.proto.
_CHUNK = 0x12  # field 2, length-delimited
_OFFSET = 0x08  # field 1, varint
_CHECKSUM = 0x19  # field 3, fixed64
_PAYLOAD = 0x12  # field 2, length-delimited

_VARINT, _FIXED64, _BYTES, _GROUP_BEGIN, _GROUP_END, _FIXED32 = range(6)
_NUM_BYTES = {_FIXED64: 8, _GROUP_BEGIN: 0, _GROUP_END: 0, _FIXED32: 4}
_MAX_VARINT_BYTES = 10
# The tag and the length of a message inside another one.
_MAX_LABEL_BYTES = 7


class MalformedMessage(ValueError):
    """The bytes are not a message in protobuf's wire format."""


def read_fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yields (tag, value) of each field of a protobuf message: an int for a varint, else the bytes.

    Raises:
        MalformedMessage: the message breaks the format; all fields before the fault were yielded.
    """
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        if tag & 7 == _VARINT:
            number, position = _read_varint(message, position)
            yield tag, number
            continue
        if tag & 7 == _BYTES:
            num_bytes, position = _read_varint(message, position)
        elif (num_bytes := _NUM_BYTES.get(tag & 7, -1)) < 0:
            raise MalformedMessage(f"tag {tag}")
        if position + num_bytes > len(message):
            raise MalformedMessage(f"a field of {num_bytes} bytes, {len(message) - position} are left")
        yield tag, message[position : position + num_bytes]
        position += num_bytes


def _read_varint(message: memoryview, position: int) -> tuple[int, int]:
    """Reads a protobuf varint at `position` and returns (number, position after the varint)."""
    number = 0
    for index, digit in enumerate(message[position : position + _MAX_VARINT_BYTES]):
        number |= (digit & 0x7F) << (7 * index)
        if digit <= 0x7F:
            return number, position + index + 1
    raise MalformedMessage(f"no number at byte {position}")


def varint(number: int) -> bytes:
    """Encodes a number that is not negative as a protobuf varint."""
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def parse(
    serialised: bytes,
    message_type: type[M],
    max_bytes: int,
    *,
    header_path: Sequence[int] = (),
    malformed: type[InvalidArgument] = InvalidArgument,
) -> M:
    """Parses a protobuf message of type `message_type`, of at most `max_bytes` bytes.

    `header_path` is the path of field numbers where the message may have a batch header; see `check_num_fields`.

    Raises:
        LimitExceeded: the message has too many bytes, or too many fields of a header.
        InvalidArgument, or its subclass `malformed`: the bytes are no such message.
    """
    if len(serialised) > max_bytes:
        raise LimitExceeded(f"a message of {len(serialised)} bytes is over the limit of {max_bytes}")
    if header_path:
        check_num_fields(serialised, header_path)
    try:
        return message_type.FromString(serialised)
    except DecodeError as error:
        raise malformed(f"the message is not a {message_type.DESCRIPTOR.full_name}") from error


def divide(messages: Iterable[M], max_bytes: int) -> Iterator[list[M]]:
    """Divides messages, in their order, into lists that take at most `max_bytes` as a repeated field of a message.

    A message that is larger by itself gets a list of its own.
    """
    some: list[M] = []
    num_bytes = 0
    for message in messages:
        size = message.ByteSize() + _MAX_LABEL_BYTES
        if some and num_bytes + size > max_bytes:
            yield some
            some = []
            num_bytes = 0
        some.append(message)
        num_bytes += size
    if some:
        yield some


def check_num_fields(message: bytes, path: Sequence[int]) -> None:
    """Checks that a batch header has not too many fields, before protobuf makes an object of each field.

    A small message can hold many fields. `path` has two field numbers: of a field of the message, and of a field inside
    it.

    Raises:
        LimitExceeded: the message and its header have more than MAX_HEADER_FIELDS fields together.
    """
    with suppress(MalformedMessage):
        _count_fields(memoryview(message), path, 0)


def _count_fields(message: memoryview, path: Sequence[int], counted: int) -> int:
    """Adds to `counted` the fields of a message and of the submessages on a path; LimitExceeded at too many."""
    for tag, value in read_fields(message):
        counted += 1
        if counted > MAX_HEADER_FIELDS:
            raise LimitExceeded(f"a batch header has at most {MAX_HEADER_FIELDS} fields")
        if path and tag == path[0] << 3 | _BYTES:
            counted = _count_fields(value, path[1:], counted)
    return counted


def checksum(pieces: Sequence[memoryview]) -> int:
    """Returns the xxh3-64 checksum of several pieces of bytes, back to back."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def serialise_chunk(offset: int, pieces: Sequence[memoryview]) -> bytes:
    """Serialises the message with one chunk of a batch: its offset in bytes, its checksum, its payload."""
    num_bytes = sum(len(piece) for piece in pieces)
    digest = checksum(pieces).to_bytes(8, "little")
    parts = (bytes([_OFFSET]), varint(offset), bytes([_CHECKSUM]), digest, bytes([_PAYLOAD]), varint(num_bytes))
    fields = b"".join(parts)
    return b"".join((bytes([_CHUNK]), varint(len(fields) + num_bytes), fields, *pieces))


def read_chunk(message: bytes) -> tuple[int, int, memoryview] | None:
    """Parses a message made by `serialise_chunk` into (offset, checksum, payload); None for any other message."""
    try:
        ((tag, chunk),) = read_fields(memoryview(message))
        if tag != _CHUNK:
            return None
        (first, offset), (second, digest), (third, payload) = read_fields(chunk)
    except ValueError:  # malformed, or another number of fields
        return None
    is_ours = (first, second, third) == (_OFFSET, _CHECKSUM, _PAYLOAD)
    return (offset, int.from_bytes(digest, "little"), payload) if is_ours else None
