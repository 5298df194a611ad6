"""A look at the header of a batch stream before protobuf takes it apart: a small message can make many objects."""

from __future__ import annotations

from collections.abc import Sequence

# One header, run id, epoch and batch; slot, rows, bytes and one entry per column. Repeated fields add up.
MAX_HEADER_FIELDS = 64

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SKIPPED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10


class TooManyFields(ValueError):
    """More fields than a header can have."""


def check_num_fields(message: bytes, path: Sequence[int]) -> None:
    """Counts the fields of a message, and of the submessages that are found along a path, without making any of them.

    Args:
        message: serialised; what protobuf would refuse is left to protobuf.
        path: field numbers; the first is looked into in the message, the second in what is found there.

    Raises:
        TooManyFields: more than MAX_HEADER_FIELDS in all.
    """
    _count(memoryview(message), path, 0)


def _count(message: memoryview, path: Sequence[int], counted: int) -> int:
    position = 0
    while position < len(message):
        counted += 1
        if counted > MAX_HEADER_FIELDS:
            raise TooManyFields(f"a batch header has at most {MAX_HEADER_FIELDS} fields")
        try:
            tag, position = _read_varint(message, position)
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, position = _read_varint(message, position)
            elif wire_type == _BYTES:
                num_bytes, position = _read_varint(message, position)
                if path and tag >> 3 == path[0] and num_bytes <= len(message) - position:
                    counted = _count(message[position : position + num_bytes], path[1:], counted)
                position += num_bytes
            elif wire_type in _SKIPPED_BYTES:
                position += _SKIPPED_BYTES[wire_type]
            else:
                return counted
        except IndexError:
            return counted
    return counted


def _read_varint(message: memoryview, position: int) -> tuple[int, int]:
    """(number, position behind it); IndexError where there is none."""
    number = 0
    for index in range(_MAX_VARINT_BYTES):
        digit = message[position + index]
        number |= (digit & 0x7F) << (7 * index)
        if digit <= 0x7F:
            return number, position + index + 1
    raise IndexError(position)
