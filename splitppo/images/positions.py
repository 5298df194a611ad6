"""Where the tokens of images stand in a prompt, and the positions of its tokens in time, height and width.

    prompt     a  b  <start>  i  i  i  i  i  i  <end>  c        an image of 2 x 3 tokens
    time       0  1  2        3  3  3  3  3  3  6      7
    height     0  1  2        3  3  3  4  4  4  6      7
    width      0  1  2        3  4  5  3  4  5  6      7

Tokens of a response follow: each is one more than the largest position before it, in all three.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitppo.images.grid import num_image_tokens
from splitppo.images.settings import ImageSettings

Grid = tuple[int, int]  # rows and columns of patches


def image_starts(prompt_ids: NDArray[Any], grids: Sequence[Grid], settings: ImageSettings) -> NDArray[np.int64]:
    """Returns the place in a prompt of the first token of each image, [num_images] int64.

    Args:
        prompt_ids: [prompt tokens], the ids of one prompt, in which an image has as many image tokens as it needs.
        grids: rows and columns of patches of each image.
        settings: those of the model.

    Raises:
        ValueError: the prompt has more or fewer image tokens than the images need, or other tokens within an image.
    """
    counts = np.array([num_image_tokens(*grid, settings) for grid in grids], np.int64)
    places = np.flatnonzero(prompt_ids == settings.image_token_id)
    if len(places) != counts.sum():
        raise ValueError(f"the prompt has {len(places)} image tokens, its images need {counts.sum()}")
    firsts = np.cumsum(counts) - counts
    starts: NDArray[np.int64] = places[firsts]
    lasts = places[firsts + counts - 1]
    torn = np.flatnonzero(lasts - starts != counts - 1)
    if len(torn):
        raise ValueError(f"other tokens stand between the tokens of image {torn[0] + 1}")
    return starts


def image_positions(prompt_ids: NDArray[Any], grids: Sequence[Grid], settings: ImageSettings) -> NDArray[np.int64]:
    """Returns the positions of the tokens of one prompt in time, height and width, [3, prompt tokens] int64.

    These are the positions of `get_rope_index` of both families. The arguments and errors are those of `image_starts`.
    """
    positions = np.empty((3, len(prompt_ids)), np.int64)
    done = 0  # tokens before this one have their positions
    position = 0  # of the next token
    for start, (rows, columns) in zip(image_starts(prompt_ids, grids, settings).tolist(), grids, strict=True):
        positions[:, done:start] = position + np.arange(start - done)
        position += start - done
        token_rows = rows // settings.merge_size
        token_columns = columns // settings.merge_size
        done = start + token_rows * token_columns
        positions[0, start:done] = position
        positions[1, start:done] = position + np.repeat(np.arange(token_rows), token_columns)
        positions[2, start:done] = position + np.tile(np.arange(token_columns), token_rows)
        position += max(token_rows, token_columns)
    positions[:, done:] = position + np.arange(len(prompt_ids) - done)
    return positions
