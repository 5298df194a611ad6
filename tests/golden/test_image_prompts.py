"""Prompts with images have the tokens that transformers' own processors give them."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from controller.data.tokenizer import load_tokenizer
from splitppo.images.columns import images_of_row
from tests.support.seeds import shifted
from tests.support.vision_folders import image_row, load_with_images, write_vision_folder
from tests.support.vision_models import FAMILIES, Family, draw_image, load_processor

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_have_the_tokens_and_the_grids_of_transformers(tmp_path: Path, family: Family) -> None:
    model = write_vision_folder(tmp_path / family, family)
    draws = random.Random(shifted(3))
    images = [[_drawn(draws) for _ in range(number % 4)] for number in range(40)]
    rows = [
        image_row(f"a{'<image>b' * len(of_row)}?", [{"bytes": one, "path": None} for one in of_row])
        for of_row in images
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    batch = load_with_images(model, tmp_path / "train.parquet")
    assert batch.images is not None
    template = load_tokenizer(model).chat_template
    processor = load_processor(Path(model))
    columns = zip(batch.images["images"].rows(), batch.images["image_sizes"].rows(), strict=True)
    for row, of_row, prompt, column in zip(batch.rows, images, batch.prompts.rows(), columns, strict=True):
        decoded = [Image.open(io.BytesIO(image)) for image in of_row]
        inputs: Any = processor(text=[template.render(row.prompt)], images=decoded or None)
        assert prompt.tolist() == inputs["input_ids"][0]
        grids = [[1, image.rows, image.columns] for image in images_of_row(*column)]
        assert grids == (inputs["image_grid_thw"].tolist() if of_row else [])


def _drawn(draws: random.Random) -> bytes:
    width, height = (draws.randint(10, 300) for _ in range(2))
    return draw_image(draws.randrange(1000), width, height, draws.choice(["PNG", "JPEG", "WEBP"]))
