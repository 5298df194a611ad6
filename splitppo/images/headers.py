"""Formats and sizes of images, from the headers of their files: nothing is decoded.

A header is a few bytes among many that nobody needs to trust: whoever decodes the file compares its size with this one.
"""

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

ImageFormat = Literal["PNG", "JPEG", "WEBP"]

MAX_MEGAPIXELS = 64
MAX_ASPECT_RATIO = 200  # longer side by shorter side; transformers' processors of both families have the same limit

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_EXIF_ORIENTATION = 0x0112

# Marker codes of JPEG (ITU-T T.81, table B.1).
# 0xFF before a marker may be repeated, and before 0 it is no marker.
_JPEG_MARKER = re.compile(rb"\xff([^\x00\xff])", re.DOTALL)
_JPEG_APP1 = 0xE1
_JPEG_START_OF_SCAN = 0xDA
_JPEG_END_OF_IMAGE = 0xD9
_JPEG_WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD9))
_JPEG_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}

_VP8X_ANIMATION = 0x02


@dataclass(frozen=True)
class ImageHeader:
    """The facts in the header of an image's file.

    Attributes:
        format: the format of the file.
        width, height: of the image as it is seen, in pixels: after the rotation that `orientation` asks for.
        orientation: the orientation of EXIF, from 1 (as stored) to 8.
    """

    format: ImageFormat
    width: int
    height: int
    orientation: int

    @property
    def stored_size(self) -> tuple[int, int]:
        """Width and height of the image as it is stored, before the rotation."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


@dataclass
class _Found:
    """The facts that were found in a file so far: `size` is (width, height) as stored."""

    size: tuple[int, int] | None = None
    exif: bytearray = field(default_factory=bytearray)
    num_frames: int = 1


def read_header(data: bytes | memoryview) -> ImageHeader:
    """Reads the header of an image's file.

    Raises:
        ValueError: the file is no PNG, JPEG or WebP, ends too early, is animated, or has a size that is not read. The
            message is the rest of a sentence, e.g. "is truncated", whose subject the caller knows.
    """
    content = bytes(data)
    image_format = _format_of(content)
    found = _READERS[image_format](content)
    if found.size is None:
        raise ValueError("is truncated")
    if found.num_frames > 1:
        raise ValueError(f"is animated, with {found.num_frames} frames; only still images are read")
    _check_size(*found.size)
    width, height = found.size
    orientation = _orientation(bytes(found.exif))
    if orientation >= 5:  # by a quarter
        return ImageHeader(image_format, height, width, orientation)
    return ImageHeader(image_format, width, height, orientation)


def _format_of(data: bytes) -> ImageFormat:
    """Returns the format of a file by its first bytes; ValueError if it is none of the three."""
    if data.startswith(_PNG):
        return "PNG"
    if data.startswith(_JPEG):
        return "JPEG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    raise ValueError("is no PNG, JPEG or WebP")


def _check_size(width: int, height: int) -> None:
    """Raises ValueError for an image that has no pixels, too many, or is too narrow."""
    if not width or not height:
        raise ValueError(f"has no pixels, its size is {width}×{height}")
    if width * height > MAX_MEGAPIXELS * 1_000_000:
        # Rounded up, so that an image just above the limit is not said to have what is allowed.
        raise ValueError(f"has {-(-width * height // 1_000_000)} megapixels, at most {MAX_MEGAPIXELS} are read")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        ratio = -(-max(width, height) // min(width, height))
        sides = "wide as high" if width > height else "high as wide"
        raise ValueError(f"is {ratio} times as {sides}, at most {MAX_ASPECT_RATIO}")


def _read_png(data: bytes) -> _Found:
    """Reads the chunks of a PNG file (ISO/IEC 15948); IHDR has the size, eXIf the orientation, acTL the frames."""
    found = _Found()
    position = len(_PNG)
    name = b""
    while name != b"IEND":
        if position + 8 > len(data):
            raise ValueError("is truncated")
        length, name = struct.unpack_from(">I4s", data, position)
        content = data[position + 8 : position + 8 + length] if name in (b"IHDR", b"eXIf", b"acTL") else b""
        position += length + 12  # with length, name and checksum
        if position > len(data):
            raise ValueError("is truncated")
        if name == b"IHDR" and length >= 8 and found.size is None:
            found.size = struct.unpack_from(">II", content)
        elif name == b"eXIf":
            found.exif = bytearray(content)
        elif name == b"acTL" and length >= 4:
            (found.num_frames,) = struct.unpack_from(">I", content)
    return found


def _read_jpeg(data: bytes) -> _Found:
    """Reads the segments of a JPEG file before its pixels (ITU-T T.81, annex B).

    The frame has the size, APP1 the orientation. A file in which a second image follows, as cameras write, is read as
    its first one.
    """
    found = _Found()
    for marker, content in _jpeg_segments(data):
        if marker in _JPEG_START_OF_FRAME and len(content) >= 5:
            height, width = struct.unpack_from(">HH", content, 1)
            found.size = width, height
        elif marker == _JPEG_APP1 and content.startswith(b"Exif\0\0"):
            found.exif += content[6:]  # long blocks are spread over several segments
    return found


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields marker and content of each segment before the pixels."""
    position = 2
    while True:
        found = _JPEG_MARKER.search(data, position)
        if found is None:
            raise ValueError("is truncated")
        marker = found[1][0]
        position = found.end()
        if marker in _JPEG_WITHOUT_LENGTH:
            continue
        if marker in (_JPEG_START_OF_SCAN, _JPEG_END_OF_IMAGE):
            return
        if position + 2 > len(data):
            raise ValueError("is truncated")
        (length,) = struct.unpack_from(">H", data, position)
        yield marker, data[position + 2 : position + length]
        position += max(length, 2)


def _read_webp(data: bytes) -> _Found:
    """Reads the chunks of a WebP file (RFC 9649, section 2): VP8X, VP8L or VP8 has the size, EXIF the orientation."""
    if len(data) < 12 or struct.unpack_from("<I", data, 4)[0] + 8 > len(data):
        raise ValueError("is truncated")
    found = _Found()
    num_animation_frames = 0
    position = 12
    while position + 8 <= len(data):
        name, length = struct.unpack_from("<4sI", data, position)
        start = position + 8
        if found.size is None:
            found.size = _webp_size(name, data[start : start + 10])
        if name == b"EXIF":
            found.exif = bytearray(data[start : start + length].removeprefix(b"Exif\0\0"))
        elif name == b"ANMF":
            num_animation_frames += 1
        position = start + length + length % 2
    found.num_frames = max(1, num_animation_frames)
    return found


def _webp_size(name: bytes, content: bytes) -> tuple[int, int] | None:
    """Returns width and height by the first chunk of a WebP file, None if it has none."""
    if len(content) < 10:
        return None
    if name == b"VP8X":
        return 1 + int.from_bytes(content[4:7], "little"), 1 + int.from_bytes(content[7:10], "little")
    if name == b"VP8L" and content[0] == 0x2F:
        (bits,) = struct.unpack_from("<I", content, 1)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if name == b"VP8 " and content[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", content, 6)
        return width & 0x3FFF, height & 0x3FFF
    return None


_READERS: Mapping[ImageFormat, Callable[[bytes], _Found]] = {
    "PNG": _read_png,
    "JPEG": _read_jpeg,
    "WEBP": _read_webp,
}


def _orientation(exif: bytes) -> int:
    """Returns the orientation in a block of EXIF: 1, as stored, if it has none that is one, or cannot be read."""
    if not exif:
        return 1
    from PIL import Image

    block = Image.Exif()
    try:
        block.load(exif)
        orientation = block.get(_EXIF_ORIENTATION, 1)
    except (SyntaxError, ValueError, KeyError, TypeError, OSError, struct.error):
        return 1  # viewers and browsers show such an image as it is stored
    return orientation if orientation in range(1, 9) else 1
