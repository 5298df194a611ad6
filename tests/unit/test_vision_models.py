"""The tiny models that read images: transformers' own classes load their folders, and what is seen changes the text."""

import io
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.support.vision_models import (
    FAMILIES,
    IMAGE,
    VISION_VOCABULARY,
    Family,
    draw_image,
    load_processor,
    save_vision_policy,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_a_folder_and_its_model_sees_the_image(family: Family, tmp_path: Path) -> None:
    folder = save_vision_policy(tmp_path, family)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = load_processor(folder)
    content = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    seen = [
        processor(text=[text], images=[_opened(draw_image(seed, 100, 70))], return_tensors="pt") for seed in range(2)
    ]

    with torch.no_grad():
        first, second = (model(**inputs).logits[0, -1] for inputs in seen)

    _, rows, columns = seen[0]["image_grid_thw"][0].tolist()
    assert (seen[0]["input_ids"] == VISION_VOCABULARY.index(IMAGE)).sum() == rows * columns // 4
    assert torch.isfinite(first).all()
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_and_changes_of_either_part_make_another_model(family: Family, tmp_path: Path) -> None:
    plain = save_vision_policy(tmp_path / "plain", family)
    again = save_vision_policy(tmp_path / "again", family)
    other = save_vision_policy(tmp_path / "other", family, seed=1)
    deep = AutoModelForImageTextToText.from_pretrained(
        save_vision_policy(tmp_path / "deep", family, num_hidden_layers=3, vision={"depth": 4})
    )

    weights = [(folder / "model.safetensors").read_bytes() for folder in (plain, again, other)]
    assert weights[0] == weights[1] != weights[2]
    assert len(deep.model.language_model.layers) == 3
    assert len(deep.model.visual.blocks) == 4


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP"])
def test_a_drawn_image_is_a_file_of_that_format(file_format: str) -> None:
    drawn = draw_image(0, 40, 30, file_format)

    image = _opened(drawn)
    assert (image.format, image.size) == (file_format, (40, 30))
    assert draw_image(0, 40, 30, file_format) == drawn != draw_image(1, 40, 30, file_format)


def _opened(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file))
