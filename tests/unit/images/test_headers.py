"""Headers of images: sizes and formats without decoding, and a sentence for each file that is not read."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from splitppo.images.headers import ImageHeader, read_header
from splitppo.images.pixels import decode_rgb
from tests.support.drawn_images import ORIENTATION
from tests.support.vision_models import draw_image

FORMATS = ("PNG", "JPEG", "WEBP")


def chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A PNG file of this size, in its header, which has no pixels at all."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def jpeg(width: int, height: int, *segments: bytes) -> bytes:
    """A JPEG file of this size, in its header, which has no pixels at all."""
    frame = struct.pack(">BHHB", 8, height, width, 3) + bytes(9)
    return b"\xff\xd8" + b"".join(segments) + b"\xff\xc0" + struct.pack(">H", len(frame) + 2) + frame + b"\xff\xda"


def webp(width: int, height: int, *chunks: bytes, flags: int = 0) -> bytes:
    """A WebP file of this size, in its header, which has no pixels at all."""
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    content = b"WEBP" + b"VP8X" + struct.pack("<IB3x", 10, flags) + sides + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(content)) + content


HEADERS = {"PNG": png, "JPEG": jpeg, "WEBP": webp}


def animated(file_format: str, num_frames: int) -> bytes:
    frames = [Image.new("RGB", (8, 8), (40 * index, 0, 0)) for index in range(num_frames)]
    file = io.BytesIO()
    frames[0].save(file, file_format, save_all=True, append_images=frames[1:])
    return file.getvalue()


def saved(file_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4)).save(file, file_format, **options)
    return file.getvalue()


# What is read.


@pytest.mark.parametrize("file_format", FORMATS)
def test_format_and_size_are_read(file_format: str) -> None:
    header = read_header(draw_image(0, 37, 21, file_format))

    assert header == ImageHeader(file_format, 37, 21, 1)


@pytest.mark.parametrize("options", [{"lossless": True}, {"exif": b"Exif\0\0"}, {"progressive": True}])
def test_other_ways_to_write_a_file_have_a_size_too(options: dict[str, Any]) -> None:
    for file_format in ("JPEG", "WEBP"):
        header = read_header(saved(file_format, **options))
        assert (header.width, header.height) == (6, 4)


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_turned_image_has_the_size_that_is_seen(file_format: str) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6

    header = read_header(saved(file_format, exif=exif))

    assert (header.width, header.height, header.orientation) == (4, 6, 6)
    assert header.stored_size == (6, 4)


def test_a_png_may_have_its_orientation_behind_the_pixels() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 8
    without = saved("PNG")
    data = without[:-12] + chunk(b"eXIf", exif.tobytes()[6:]) + without[-12:]

    assert read_header(data).orientation == 8
    assert decode_rgb(data).shape == (6, 4, 3)


def test_blocks_of_exif_are_joined_over_any_number_of_segments() -> None:
    """As many segments as would take minutes if each copied those before it."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    block = exif.tobytes() + bytes(6_000_000)
    pieces = [block[start : start + 20] for start in range(0, len(block), 20)]
    segments = [b"\xff\xe1" + struct.pack(">H", len(piece) + 8) + b"Exif\0\0" + piece for piece in pieces]

    assert read_header(jpeg(3, 4, *segments)) == ImageHeader("JPEG", 4, 3, 6)


def test_fill_bytes_may_stand_before_a_marker() -> None:
    data = jpeg(3, 4)

    assert read_header(data[:2] + b"\xff" * 1000 + data[2:]) == ImageHeader("JPEG", 3, 4, 1)
    with pytest.raises(ValueError, match=r"^is truncated$"):
        read_header(data[:2] + b"\xff" * 1000)


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0nonsense", b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(30)])
@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of what is corrupt
def test_damaged_exif_turns_nothing(exif: bytes) -> None:
    assert read_header(saved("JPEG", exif=exif)).orientation == 1


def test_an_orientation_that_is_none_turns_nothing() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 9

    assert read_header(saved("JPEG", exif=exif)).orientation == 1


def test_an_image_with_a_second_one_behind_it_is_its_first_one() -> None:
    first = Image.new("RGB", (8, 4), (200, 0, 0))
    file = io.BytesIO()
    first.save(file, "MPO", save_all=True, append_images=[Image.new("RGB", (2, 2))])

    assert read_header(file.getvalue()) == ImageHeader("JPEG", 8, 4, 1)
    assert decode_rgb(file.getvalue()).shape == (4, 8, 3)


@pytest.mark.parametrize("file_format", FORMATS)
def test_reading_a_header_decodes_nothing(file_format: str) -> None:
    """There are no pixels in these files, and less memory is taken than a row of the image would need."""
    data = HEADERS[file_format](8000, 7999)

    tracemalloc.start()
    header = read_header(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (header.width, header.height) == (8000, 7999)
    assert peak < 8000
    with pytest.raises(ValueError, match="is truncated or damaged"):
        decode_rgb(data)


# What is not read.


@pytest.mark.parametrize("data", [b"", b"GIF89a" + bytes(50), b"BM" + bytes(50), b"<svg/>", b"RIFF\0\0\0\0WAVE"])
def test_other_formats_are_refused(data: bytes) -> None:
    for read in (read_header, decode_rgb):
        with pytest.raises(ValueError, match=r"^is no PNG, JPEG or WebP$"):
            read(data)


@pytest.mark.parametrize(
    ("width", "height", "sentence"),
    [
        (10_000, 10_000, "has 100 megapixels, at most 64 are read"),
        (8001, 8000, "has 65 megapixels, at most 64 are read"),
        (6000, 20, "is 300 times as wide as high, at most 200"),
        (1, 201, "is 201 times as high as wide, at most 200"),
    ],
)
@pytest.mark.parametrize("file_format", FORMATS)
def test_an_image_that_is_too_large_or_too_narrow_is_refused_by_its_header(
    file_format: str, width: int, height: int, sentence: str
) -> None:
    for read in (read_header, decode_rgb):
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            read(HEADERS[file_format](width, height))


@pytest.mark.parametrize(("width", "height"), [(8000, 8000), (200, 1), (1, 200), (1, 1)])
def test_the_largest_and_narrowest_images_are_read(width: int, height: int) -> None:
    header = read_header(png(width, height))

    assert (header.width, header.height) == (width, height)


@pytest.mark.parametrize(("make", "size"), [(png, (0, 5)), (png, (5, 0)), (jpeg, (0, 5)), (jpeg, (5, 0))])
def test_an_image_without_pixels_is_refused(make: Any, size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"^has no pixels, its size is {size[0]}×{size[1]}$"):
        read_header(make(*size))


@pytest.mark.parametrize("file_format", ["PNG", "WEBP"])
def test_an_animated_image_is_refused(file_format: str) -> None:
    for read in (read_header, decode_rgb):
        with pytest.raises(ValueError, match=r"^is animated, with 3 frames; only still images are read$"):
            read(animated(file_format, 3))


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_torn_file_is_refused_wherever_it_is_torn(file_format: str) -> None:
    """Some are torn within the header, the others are found when they are decoded at the latest."""
    data = draw_image(3, 20, 20, file_format)
    ends = range(12, len(data) - 12, 7)

    for end in ends:
        with pytest.raises(ValueError, match=r"^is truncated"):
            decode_rgb(data[:end])


@pytest.mark.parametrize("file_format", ["PNG", "WEBP"])
def test_a_torn_file_that_says_its_length_is_refused_by_its_header(file_format: str) -> None:
    data = draw_image(3, 20, 20, file_format)

    with pytest.raises(ValueError, match=r"^is truncated$"):
        read_header(data[:-5])


def test_pixels_of_another_size_than_the_header_has_are_not_decoded() -> None:
    """A second header claims more pixels than the first one, by which the file was let in."""
    larger = chunk(b"IHDR", struct.pack(">IIBBBBB", 9000, 9000, 8, 2, 0, 0, 0))
    data = png(5, 5)[:33] + larger + draw_image(0, 5, 5)[33:]

    assert read_header(data).width == 5
    with pytest.raises(ValueError, match=r"^is truncated or damaged: its size is 9000×9000$"):
        decode_rgb(data)


def test_text_that_unpacks_to_very_much_is_refused() -> None:
    bomb = zlib.compress(bytes(PngImagePlugin.MAX_TEXT_CHUNK + 1))
    data = draw_image(0, 8, 8)
    data = data[:33] + chunk(b"zTXt", b"Comment\0\0" + bomb) + data[33:]

    assert read_header(data).format == "PNG"
    with pytest.raises(ValueError, match="is truncated or damaged: Decompressed data too large"):
        decode_rgb(data)


def test_a_palette_that_is_missing_is_a_damage() -> None:
    file = io.BytesIO()
    Image.new("P", (8, 8), 1).save(file, "PNG")
    data = file.getvalue()
    data = data[: data.index(b"PLTE") - 4] + data[data.index(b"IDAT") - 4 :]

    assert read_header(data).format == "PNG"
    with pytest.raises(ValueError, match=r"^is truncated or damaged: \w"):
        decode_rgb(data)


def test_damaged_files_raise_nothing_but_sentences() -> None:
    rng = np.random.default_rng(0)
    files = [draw_image(1, 16, 16, file_format) for file_format in FORMATS]
    sentences = set()
    for index in range(3000):
        data = bytearray(files[index % 3])
        for place in rng.integers(4, 120, size=2):
            data[place] = rng.integers(256)
        for read in (read_header, decode_rgb):
            try:
                read(bytes(data))
            except ValueError as error:
                sentences.add(str(error))

    assert len(sentences) > 10
    assert all(sentence.startswith(("is ", "has ")) for sentence in sentences)
