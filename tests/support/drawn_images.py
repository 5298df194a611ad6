"""Files of random images in the formats and modes that Pillow writes, with what they show, for tests of images."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ORIENTATION = 0x0112  # tag of EXIF

# Format and Pillow's mode, with what else the file has.
KINDS = (
    ("PNG", "1"),
    ("PNG", "L"),
    ("PNG", "LA"),
    ("PNG", "P"),
    ("PNG", "P, one colour transparent"),
    ("PNG", "RGB"),
    ("PNG", "RGB, one colour transparent"),
    ("PNG", "RGBA"),
    ("PNG", "I;16"),
    ("JPEG", "L"),
    ("JPEG", "RGB"),
    ("JPEG", "CMYK"),
    ("WEBP", "RGB"),
    ("WEBP", "RGBA"),
    ("WEBP", "RGBA, lossless"),
)


@dataclass(frozen=True)
class Drawn:
    """The file of an image, and its pixels as they are seen on white, [height, width, 3] uint8."""

    data: bytes
    rgb: NDArray[np.uint8]


def draw(rng: np.random.Generator, kind: tuple[str, str], width: int, height: int, orientation: int = 1) -> Drawn:
    """Draws an image of a kind of `KINDS`; its size is the stored one, before the rotation by `orientation`."""
    file_format, mode_and_more = kind
    mode, _, what = mode_and_more.partition(", ")
    options: dict[str, Any] = {}
    if what == "lossless":
        options["lossless"] = True
    image = _of_mode(rng, mode, width, height)
    if what == "one colour transparent":
        options["transparency"] = image.getpixel((0, 0))
    if orientation != 1:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return Drawn(file.getvalue(), seen(file.getvalue(), orientation))


def seen(data: bytes, orientation: int) -> NDArray[np.uint8]:
    """What Pillow decodes, on white by the formula of Porter and Duff, and turned with numpy."""
    image = Image.open(io.BytesIO(data))
    if image.mode == "I;16":
        grey = (np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)
        rgb = np.repeat(grey[:, :, None], 3, axis=2)
    elif image.has_transparency_data:
        rgba = np.asarray(image.convert("RGBA")).astype(np.int64)
        colour, alpha = rgba[:, :, :3], rgba[:, :, 3:]
        rgb = ((colour * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    else:
        rgb = np.asarray(image.convert("RGB"))
    return np.ascontiguousarray(_TURNS[orientation](rgb))


def _of_mode(rng: np.random.Generator, mode: str, width: int, height: int) -> Image.Image:
    """Draws smooth random colours, and as smooth an alpha where the mode has one."""
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 1 << 16, (height, width), dtype=np.uint16))
    channels = Image.fromarray(rng.integers(0, 256, (4, 4, 4), dtype=np.uint8), "RGBA")
    smooth = channels.resize((width, height), Image.Resampling.BICUBIC)
    if mode in ("RGBA", "LA"):
        return smooth.convert(mode)
    return smooth.convert("RGB").convert(mode)


# What a viewer does for each orientation of EXIF (CIPA DC-008, section 4.6.5): the stored row 0 is ...
_TURNS = {
    1: lambda rgb: rgb,  # the top, column 0 the left
    2: lambda rgb: rgb[:, ::-1],  # the top, column 0 the right
    3: lambda rgb: rgb[::-1, ::-1],  # the bottom, column 0 the right
    4: lambda rgb: rgb[::-1],  # the bottom, column 0 the left
    5: lambda rgb: rgb.transpose(1, 0, 2),  # the left, column 0 the top
    6: lambda rgb: rgb.transpose(1, 0, 2)[:, ::-1],  # the right, column 0 the top
    7: lambda rgb: rgb.transpose(1, 0, 2)[::-1, ::-1],  # the right, column 0 the bottom
    8: lambda rgb: rgb.transpose(1, 0, 2)[::-1],  # the left, column 0 the bottom
}
