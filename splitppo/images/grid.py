"""The size of an image in patches, after the resizing that both families share, and the tokens that stand for it."""

import math

from splitppo.images.headers import MAX_ASPECT_RATIO
from splitppo.images.settings import ImageSettings


def patch_grid(width: int, height: int, settings: ImageSettings) -> tuple[int, int]:
    """Returns the rows and columns of patches into which an image of this size, in pixels, is divided.

    Both are multiples of the merge size. The image is resized to them: about its aspect ratio, and within the limits
    of pixels. This is `smart_resize` of transformers' Qwen2VLImageProcessor.
    """
    factor = settings.patch_size * settings.merge_size
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > settings.max_pixels:
        shrinking = math.sqrt((height * width) / settings.max_pixels)
        new_height = max(factor, math.floor(height / shrinking / factor) * factor)
        new_width = max(factor, math.floor(width / shrinking / factor) * factor)
    elif new_height * new_width < settings.min_pixels:
        growth = math.sqrt(settings.min_pixels / (height * width))
        new_height = math.ceil(height * growth / factor) * factor
        new_width = math.ceil(width * growth / factor) * factor
    return new_height // settings.patch_size, new_width // settings.patch_size


def num_image_tokens(rows: int, columns: int, settings: ImageSettings) -> int:
    """Returns the number of tokens that stand for an image of this size in patches."""
    return rows * columns // settings.merged


def most_image_tokens(settings: ImageSettings) -> int:
    """Returns a number of tokens that no image has more of.

    An image that is reduced is rounded down, but at least to one token high, and then as wide as its aspect ratio says.
    One that is enlarged is rounded up.
    """
    token_pixels = (settings.patch_size * settings.merge_size) ** 2
    largest = settings.max_pixels / token_pixels
    smallest = settings.min_pixels / token_pixels
    reduced = max(largest, math.sqrt(largest * MAX_ASPECT_RATIO))
    sides = math.sqrt(smallest * MAX_ASPECT_RATIO) + math.sqrt(smallest / MAX_ASPECT_RATIO)  # of the longest image
    enlarged = smallest + sides + 1
    return math.ceil(max(reduced, enlarged))
