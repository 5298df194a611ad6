"""The task "<image>digit:", whose answer is the digit in the image: images of one digit each, drawn from a seed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recipes.rows import Row

DATA_SOURCE = "read_digits"
PROMPT = "<image>digit:"
IMAGE_SIDE = 32  # pixels
MAX_SHIFT = 2  # pixels from the middle, to each side
NOISE = 12.0  # standard deviation, of 255
NUM_TRAIN_IMAGES = 8_192
NUM_VAL_IMAGES = 500

# Rows of 5 cells, one text per digit.
_GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
_CELL = 3  # pixels
_DARK = (0, 100)
_BRIGHT = (156, 256)


@dataclass(frozen=True)
class Drawn:
    """An image of a digit: [32, 32, 3] uint8."""

    digit: int
    rgb: NDArray[np.uint8]


def draw(rng: np.random.Generator) -> Drawn:
    """Draws a digit in random colours, bright on dark or dark on bright, near the middle, with noise."""
    digit = int(rng.integers(10))
    colours = [rng.integers(*_DARK, 3), rng.integers(*_BRIGHT, 3)]
    paper, ink = colours if rng.random() < 0.5 else colours[::-1]
    glyph = _glyph(digit)
    height, width = glyph.shape
    down, right = rng.integers(-MAX_SHIFT, MAX_SHIFT + 1, 2)
    top = (IMAGE_SIDE - height) // 2 + down
    left = (IMAGE_SIDE - width) // 2 + right
    image = np.empty((IMAGE_SIDE, IMAGE_SIDE, 3))
    image[:] = paper
    image[top : top + height, left : left + width][glyph] = ink
    image += rng.normal(0.0, NOISE, image.shape)
    return Drawn(digit, image.clip(0, 255).astype(np.uint8))


def png_of(rgb: NDArray[np.uint8]) -> bytes:
    """Returns an image as the file of a PNG."""
    file = io.BytesIO()
    Image.fromarray(rgb).save(file, "PNG")
    return file.getvalue()


def rows_of(digits: Sequence[int], images: Sequence[bytes], split: str) -> list[Row]:
    """Makes rows of a prompt file in verl's schema, each of the digit that is right and of the file of an image."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": PROMPT}],
            "images": [{"bytes": image, "path": None}],
            "ability": "reading",
            "reward_model": {"style": "rule", "ground_truth": str(digit)},
            "extra_info": {"split": split, "index": index},
        }
        for index, (digit, image) in enumerate(zip(digits, images, strict=True))
    ]


def _glyph(digit: int) -> NDArray[np.bool_]:
    cells = np.array([[int(cell) for cell in row] for row in _GLYPHS[digit].split()], bool)
    return cells.repeat(_CELL, axis=0).repeat(_CELL, axis=1)
