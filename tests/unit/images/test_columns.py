"""Images of a row in a batch: packed, unpacked and checked against the prompt; positions worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from splitppo.images.columns import check_row, images_of_row, row_of_images
from splitppo.images.pixels import decode_rgb, make_patches
from splitppo.images.positions import image_positions, image_starts
from splitppo.images.settings import ImageSettings
from tests.support.vision_models import draw_image

START, END, IMAGE = 7, 8, 9
SETTINGS = ImageSettings(
    family="qwen2_5_vl",
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=28 * 28,
    max_pixels=28 * 28 * 16,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    resample=3,
    rescale_factor=1 / 255,
    image_token_id=IMAGE,
    vision_start_token_id=START,
    vision_end_token_id=END,
)


def prompt(*tokens: int | list[int]) -> np.ndarray:
    flat = [token for part in tokens for token in (part if isinstance(part, list) else [part])]
    return np.array(flat, np.int32)


def image(num_tokens: int) -> list[int]:
    return [START, *[IMAGE] * num_tokens, END]


def test_a_row_comes_back_as_it_was_packed() -> None:
    images, sizes = row_of_images([(b"first", 4, 6), (b"second", 2, 2)])

    assert (images.dtype, sizes.tolist()) == (np.uint8, [5, 4, 6, 6, 2, 2])
    assert [(bytes(data), *grid) for data, *grid in images_of_row(images, sizes)] == [
        (b"first", 4, 6),
        (b"second", 2, 2),
    ]


def test_a_row_without_images_has_none() -> None:
    images, sizes = row_of_images([])

    assert images_of_row(images, sizes) == []
    assert check_row(prompt(1, 2), images, sizes, SETTINGS, row=0) == []


def test_images_of_a_row_are_views() -> None:
    images, sizes = row_of_images([(b"abc", 2, 2)])
    images = images.copy()
    (only,) = images_of_row(images, sizes)

    images[0] = ord("x")

    assert bytes(only.data) == b"xbc"


def test_positions_of_a_row_by_hand() -> None:
    ids = prompt(1, image(6), 2, image(1), 3)

    assert image_starts(ids, [(4, 6), (2, 2)], SETTINGS).tolist() == [2, 11]
    #                                  a  s  i  i  i  i  i  i  e  b  s  i   e   c
    assert image_positions(ids, [(4, 6), (2, 2)], SETTINGS).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8, 9, 10],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    ]


def test_positions_of_text_count_up() -> None:
    assert image_positions(prompt(1, 2, 3), [], SETTINGS).tolist() == [[0, 1, 2]] * 3


def test_images_that_touch_are_told_apart_by_their_sizes() -> None:
    ids = prompt([IMAGE] * 3)

    assert image_starts(ids, [(2, 4), (2, 2)], SETTINGS).tolist() == [0, 2]
    assert image_positions(ids, [(2, 4), (2, 2)], SETTINGS)[2].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("ids", "sizes", "sentence"),
    [
        (prompt(image(2)), [3, 2, 2], "the prompt has 2 image tokens, its images need 1"),
        (prompt(1, 2), [3, 2, 2], "the prompt has 0 image tokens, its images need 1"),
        (prompt(image(1)), [], "the images have 0 bytes by their sizes, column 'images' has 3"),
        (prompt(image(1)), [2, 2, 2], "the images have 2 bytes by their sizes, column 'images' has 3"),
        (prompt(image(1)), [3, 2], "expected 3 values per image, got 2"),
        (prompt(image(1)), [3, 0, 2], "sizes are above 0, got 0"),
        (prompt(image(1)), [3, -2, 2], "sizes are above 0, got -2"),
        (prompt(image(1)), [3, 1, 4], "image 1 is 1×4 patches, not multiples of 2"),
        (prompt(image(1), image(1)), [3, 2, 4], "other tokens stand between the tokens of image 1"),
    ],
)
def test_a_row_that_does_not_fit_its_prompt_is_refused(ids: np.ndarray, sizes: list[int], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^column 'image_sizes', row 3: {sentence}$"):
        check_row(ids, np.frombuffer(b"abc", np.uint8), np.array(sizes, np.int32), SETTINGS, row=3)


def test_an_image_of_another_grid_than_was_counted_is_refused() -> None:
    rgb = decode_rgb(draw_image(0, 112, 84))

    assert make_patches(rgb, (6, 8), SETTINGS).shape == (48, SETTINGS.patch_dim)
    with pytest.raises(ValueError, match=r"^is 6×8 patches here, 8×12 were counted$"):
        make_patches(rgb, (8, 12), SETTINGS)
