"""Pixels, counts and positions are those of transformers' own processors and models, for 400 rows of images."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from splitppo.images.grid import num_image_tokens, patch_grid
from splitppo.images.headers import read_header
from splitppo.images.pixels import decode_rgb, make_patches
from splitppo.images.positions import image_positions
from splitppo.images.settings import ImageSettings, read_image_settings
from tests.support.drawn_images import KINDS, Drawn, draw
from tests.support.models import of_transformers
from tests.support.seeds import shifted
from tests.support.vision_models import FAMILIES, IMAGE, VISION_END, VISION_START, load_processor, save_vision_policy

NUM_ROWS = 400
MAX_TOKENS = 100  # of an image
PART = f"{VISION_START}{IMAGE}{VISION_END}"


@dataclass
class Vision:
    """A tiny model's settings, transformers' processor, and the model."""

    settings: ImageSettings
    processor: Any
    model: Any


@pytest.fixture(scope="module", params=FAMILIES)
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vision:
    folder = save_vision_policy(tmp_path_factory.mktemp(request.param), request.param)
    settings = allow_more_tokens(folder)
    processor = load_processor(folder)
    assert processor.image_processor.backend == "pil"
    return Vision(settings, processor, of_transformers("AutoModelForImageTextToText").from_pretrained(folder).model)


def allow_more_tokens(folder: Path) -> ImageSettings:
    """Allows larger images in preprocessor_config.json; returns the settings that the folder then has."""
    file = folder / "preprocessor_config.json"
    content = json.loads(file.read_text())
    max_pixels = MAX_TOKENS * (content["merge_size"] * content["patch_size"]) ** 2
    if "size" in content:
        content["size"]["longest_edge"] = max_pixels
    else:
        content["max_pixels"] = max_pixels
    file.write_text(json.dumps(content))
    settings = read_image_settings(folder)
    assert settings is not None
    assert settings.max_pixels == max_pixels
    return settings


def draw_row(rng: np.random.Generator) -> tuple[str, list[Drawn]]:
    """Returns a prompt with 1 to 3 placeholders, and their images: of all kinds, most small, some very narrow."""
    images = []
    text = ""
    for _ in range(rng.integers(1, 4)):
        area = 2 ** rng.uniform(4, 16)
        ratio = 2 ** np.clip(2 * rng.normal(), -7, 7)
        width, height = (max(1, round(side)) for side in ((area * ratio) ** 0.5, (area / ratio) ** 0.5))
        images.append(draw(rng, KINDS[rng.integers(len(KINDS))], width, height, int(rng.integers(1, 9))))
        text += "ab " * rng.integers(0, 4) + PART
    return text + "c" * rng.integers(1, 9), images


@pytest.mark.slow
def test_pixels_counts_and_positions_are_those_of_transformers(vision: Vision) -> None:
    rng = np.random.default_rng(shifted(0))
    settings = vision.settings
    for _ in range(NUM_ROWS):
        text, images = draw_row(rng)
        theirs = vision.processor(
            text=[text], images=[Image.fromarray(image.rgb) for image in images], return_tensors="pt"
        )

        patches = []
        grids = []
        for image in images:
            header = read_header(image.data)
            grids.append(patch_grid(header.width, header.height, settings))
            patches.append(make_patches(decode_rgb(image.data), grids[-1], settings))
        prompt = theirs["input_ids"][0].numpy()
        assert theirs["image_grid_thw"].tolist() == [[1, *grid] for grid in grids]
        assert (prompt == settings.image_token_id).sum() == sum(num_image_tokens(*grid, settings) for grid in grids)
        assert theirs["pixel_values"].numpy().tobytes() == np.concatenate(patches).tobytes()

        positions, _ = vision.model.get_rope_index(
            theirs["input_ids"], mm_token_type_ids=theirs["mm_token_type_ids"], image_grid_thw=theirs["image_grid_thw"]
        )
        assert np.array_equal(positions[:, 0].numpy(), image_positions(prompt, grids, settings))


def test_positions_go_on_behind_the_prompt_by_one_each(vision: Vision) -> None:
    settings = vision.settings
    image = draw(np.random.default_rng(0), ("PNG", "RGB"), 200, 300)
    theirs = vision.processor(text=[f"a{PART}b"], images=[Image.fromarray(image.rgb)], return_tensors="pt")
    prompt = theirs["input_ids"][0].numpy()
    grid = patch_grid(200, 300, settings)

    whole = torch.cat([theirs["input_ids"], torch.tensor([[3, 4, 5]])], dim=1)
    kinds = torch.cat([theirs["mm_token_type_ids"], torch.zeros(1, 3, dtype=torch.int64)], dim=1)
    positions, _ = vision.model.get_rope_index(whole, kinds, image_grid_thw=theirs["image_grid_thw"])

    ours = image_positions(prompt, [grid], settings)
    assert positions[:, 0, len(prompt) :].tolist() == [[ours.max() + ahead for ahead in (1, 2, 3)]] * 3


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_decoded_as_it_is_seen(kind: tuple[str, str], orientation: int) -> None:
    image = draw(np.random.default_rng(shifted(orientation)), kind, 31, 17, orientation)

    header = read_header(image.data)

    assert (header.format, header.orientation) == (kind[0], orientation)
    assert (header.height, header.width) == image.rgb.shape[:2]
    assert np.array_equal(decode_rgb(image.data), image.rgb)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_without_transparency_are_those_that_transformers_loads(file_format: str, orientation: int) -> None:
    image = draw(np.random.default_rng(shifted(orientation)), (file_format, "RGB"), 31, 17, orientation)

    load_image = of_transformers("image_utils").load_image

    assert np.array_equal(decode_rgb(image.data), np.asarray(load_image(Image.open(io.BytesIO(image.data)))))
