"""Folders of models that read images, as far as the controller reads them, and prompt files with images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from controller.data.prompts import PromptBatch, load_prompts
from controller.data.tokenizer import load_tokenizer
from controller.models.vision import VisionInput
from splitppo.config import DataConfig
from splitppo.images.settings import read_image_settings
from tests.support.model_folders import write_weights
from tests.support.models import SIZES, save_tokenizer
from tests.support.vision_models import (
    IMAGE,
    VISION_CHAT_TEMPLATE,
    VISION_END,
    VISION_SPECIAL,
    VISION_START,
    VISION_VOCABULARY,
    Family,
    save_image_settings,
)

PATCH_SIZES = {"qwen2_5_vl": 14, "qwen3_vl": 16}


def write_vision_folder(folder: Path, family: Family = "qwen2_5_vl", **changes: Any) -> str:
    """Writes tokenizer, chat template and JSON files of a model, and weights that are none; returns the folder.

    `changes` are those to config.json.
    """
    save_tokenizer(
        folder, vocabulary=VISION_VOCABULARY, chat_template=VISION_CHAT_TEMPLATE, more_special=VISION_SPECIAL
    )
    ids = {"image_token_id": IMAGE, "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    config = {
        "model_type": family,
        "text_config": {**SIZES, "vocab_size": len(VISION_VOCABULARY), "max_position_embeddings": 1024},
        "vision_config": {"patch_size": PATCH_SIZES[family], "spatial_merge_size": 2, "temporal_patch_size": 2},
        **{key: VISION_VOCABULARY.index(token) for key, token in ids.items()},
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_image_settings(folder, family)
    write_weights(folder)
    return str(folder)


def image_row(text: Any, images: Any, **columns: Any) -> dict[str, Any]:
    """Returns a row of a data file, whose prompt is one message of the user, or the messages that are given."""
    prompt = [{"role": "user", "content": text}] if isinstance(text, str) else text
    row = {"data_source": "digits", "prompt": prompt, "reward_model": {"ground_truth": "7"}, "images": images}
    return row | columns


def load_with_images(model: str, file: str | Path, **settings: Any) -> PromptBatch:
    """Loads the training prompts of a file for the model in a folder; `settings` are keys of the section data."""
    config = DataConfig(train_files=(str(file),), train_batch_size=1, **settings)
    vision = VisionInput(read_image_settings(Path(model), min_pixels=config.min_pixels, max_pixels=config.max_pixels))
    return load_prompts(config, load_tokenizer(model), "train", vision=vision)
