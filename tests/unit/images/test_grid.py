"""The most tokens of an image: no image that is read has more, and the bound is not far away."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from splitppo.images.grid import most_image_tokens, num_image_tokens, patch_grid
from splitppo.images.headers import MAX_ASPECT_RATIO
from splitppo.images.settings import read_image_settings
from tests.support.seeds import shifted
from tests.support.vision_models import save_vision_policy


@pytest.mark.parametrize(("fewest", "most"), [(1, 1), (1, 16), (4, 100), (100, 100), (64, 1280), (1200, 1280)])
def test_no_image_has_more_tokens(tmp_path: Path, fewest: int, most: int) -> None:
    side = 28
    settings = read_image_settings(save_vision_policy(tmp_path), min_pixels=fewest * side**2, max_pixels=most * side**2)
    assert settings is not None
    rng = np.random.default_rng(shifted(0))
    found = 0
    for _ in range(3000):
        ratio = float(np.exp(rng.uniform(0.0, math.log(MAX_ASPECT_RATIO))))
        pixels = float(np.exp(rng.uniform(0.0, math.log(64e6))))
        height = max(1, round(math.sqrt(pixels / ratio)))
        width = min(max(1, round(height * ratio)), height * MAX_ASPECT_RATIO)
        found = max(found, num_image_tokens(*patch_grid(width, height, settings), settings))
        found = max(found, num_image_tokens(*patch_grid(height, width, settings), settings))
    assert found <= most_image_tokens(settings) <= 2 * found
