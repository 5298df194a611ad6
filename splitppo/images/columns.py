"""The images of a row in a batch: its column `images` has their files back to back, `image_sizes` what they measure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splitppo.images.positions import image_starts
from splitppo.images.settings import ImageSettings

IMAGE_COLUMNS = ("images", "image_sizes")
SIZES_EACH = 3  # of an image in `image_sizes`: bytes of its file, rows and columns of patches


class RowImage(NamedTuple):
    """An image of a row: the bytes of its file, and its rows and columns of patches as they were counted."""

    data: memoryview
    rows: int
    columns: int


def row_of_images(images: Sequence[tuple[bytes | memoryview, int, int]]) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Returns the values of a row in `images` and in `image_sizes`, for images as (file, patch rows, patch columns)."""
    files = np.frombuffer(b"".join(data for data, _, _ in images), np.uint8)
    sizes = [(len(data), rows, columns) for data, rows, columns in images]
    return files, np.array(sizes, np.int32).reshape(-1)


def images_of_row(images_row: NDArray[np.uint8], sizes_row: NDArray[Any]) -> list[RowImage]:
    """Returns the images of a row, as views without copying, from its values in `images` and in `image_sizes`.

    Raises:
        ValueError: `image_sizes` does not have three values per image, a size is not one, or they do not add up to the
            bytes in `images`.
    """
    if len(sizes_row) % SIZES_EACH:
        raise ValueError(f"expected {SIZES_EACH} values per image, got {len(sizes_row)}")
    sizes = sizes_row.reshape(-1, SIZES_EACH).astype(np.int64)
    if (sizes < 1).any():
        raise ValueError(f"sizes are above 0, got {sizes.min()}")
    ends = np.cumsum(sizes[:, 0])
    num_bytes = int(ends[-1]) if len(ends) else 0
    if num_bytes != len(images_row):
        raise ValueError(f"the images have {num_bytes} bytes by their sizes, column 'images' has {len(images_row)}")
    data = np.ascontiguousarray(images_row).data
    return [
        RowImage(data[end - size : end], rows, columns)
        for end, (size, rows, columns) in zip(ends.tolist(), sizes.tolist(), strict=True)
    ]


def check_row(
    prompt_ids: NDArray[Any],
    images_row: NDArray[np.uint8],
    sizes_row: NDArray[Any],
    settings: ImageSettings,
    *,
    row: int,
) -> list[RowImage]:
    """Returns the images of a row, after a check that its prompt has the tokens that they need.

    Raises:
        ValueError: as `images_of_row` and `image_starts`, or an image has a grid that cannot be merged. The message
            names the column and the row.
    """
    try:
        images = images_of_row(images_row, sizes_row)
        for number, image in enumerate(images, start=1):
            if image.rows % settings.merge_size or image.columns % settings.merge_size:
                size = f"{image.rows}×{image.columns}"
                raise ValueError(f"image {number} is {size} patches, not multiples of {settings.merge_size}")
        image_starts(prompt_ids, [(image.rows, image.columns) for image in images], settings)
    except ValueError as error:
        raise ValueError(f"column 'image_sizes', row {row}: {error}") from error
    return images
