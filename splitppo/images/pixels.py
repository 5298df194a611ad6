"""Pixels of images: decoded by Pillow, and divided into the patches that a vision model reads.

The patches are those of transformers' image processor on Pillow (`Qwen2VLImageProcessorPil`), bit for bit. Pillow's
version decides the pixels: JPEG decoders differ between builds.
"""

import io
import struct
import zlib

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from splitppo.images.grid import patch_grid
from splitppo.images.headers import read_header
from splitppo.images.settings import ImageSettings

# What Pillow raises for damaged files: its own errors, and those of code that expects sound ones.
_DAMAGES = (
    *(OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError),
    *(AssertionError, LookupError, TypeError, OverflowError, struct.error, zlib.error),
)

# How the stored image becomes the one that is seen, by EXIF's orientation.
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_rgb(data: bytes | memoryview) -> NDArray[np.uint8]:
    """Decodes the file of an image, rotated as its EXIF says; returns [height, width, 3] uint8.

    What is transparent stands on white. Values of 16 bits lose their lower 8.

    Raises:
        ValueError: as `read_header`, or the file ends too early or is damaged.
    """
    header = read_header(data)
    try:
        with Image.open(io.BytesIO(data), formats=["PNG", "JPEG", "WEBP"]) as image:
            if image.size != header.stored_size:  # before memory is taken for more pixels than the header has
                raise ValueError(f"its size is {image.size[0]}×{image.size[1]}")
            rgb = _on_white(image)
    except UnidentifiedImageError as error:
        raise ValueError("is truncated or damaged: its header cannot be read") from error
    except _DAMAGES as error:
        raise ValueError(f"is truncated or damaged: {str(error) or type(error).__name__}") from error
    if header.orientation in _TRANSPOSITIONS:
        rgb = rgb.transpose(_TRANSPOSITIONS[header.orientation])
    return np.asarray(rgb)


def _on_white(image: Image.Image) -> Image.Image:
    """Decodes an image and converts it to red, green and blue."""
    if image.mode.startswith("I"):  # grey of 16 bits, which Pillow's conversion would clip at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    with_alpha = image.convert("RGBA")
    rgb = Image.new("RGB", image.size, (255, 255, 255))
    rgb.paste(with_alpha, mask=with_alpha.getchannel("A"))
    return rgb


def make_patches(rgb: NDArray[np.uint8], grid: tuple[int, int], settings: ImageSettings) -> NDArray[np.float32]:
    """Resizes a decoded image and divides it into patches.

    Args:
        rgb: [height, width, 3] uint8.
        grid: the rows and columns of patches that were counted for the image.
        settings: those of the model.

    Returns:
        [rows * columns, patch_dim] float32: patches that are merged into one token stand together, these groups are in
        reading order; a patch has its values by colour, frame, row and column.

    Raises:
        ValueError: the image has another grid than the one that was counted.
    """
    height, width, num_colours = rgb.shape
    here = patch_grid(width, height, settings)
    if here != grid:
        raise ValueError(f"is {here[0]}×{here[1]} patches here, {grid[0]}×{grid[1]} were counted")
    rows, columns = grid
    side = settings.patch_size
    merge = settings.merge_size
    size = (columns * side, rows * side)
    resized = np.asarray(Image.fromarray(rgb).resize(size, resample=Image.Resampling(settings.resample)))
    blocks = resized.reshape(rows // merge, merge, side, columns // merge, merge, side, num_colours)
    patches = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, num_colours, 1, side * side)
    normalised = np.empty((rows * columns, num_colours, settings.temporal_patch_size, side * side), np.float32)
    for colour, values in enumerate(_normalised_values(settings)):
        normalised[:, colour] = values[patches[:, colour]]
    return normalised.reshape(rows * columns, settings.patch_dim)


def _normalised_values(settings: ImageSettings) -> NDArray[np.float32]:
    """Returns the normalised value of each colour and each of the 256 values of a pixel, [3, 256] float32.

    Rounded where transformers rounds: the product with the factor is float64, the rest float32.
    """
    rescaled = (np.arange(256, dtype=np.float64) * settings.rescale_factor).astype(np.float32)
    mean = np.array(settings.image_mean, np.float32)[:, None]
    std = np.array(settings.image_std, np.float32)[:, None]
    return (rescaled - mean) / std
