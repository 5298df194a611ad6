"""Real runs whose prompts have images: a tiny vision model beside those of `Inputs`, rows with up to three images."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.runs import Inputs
from tests.support.seeds import shifted
from tests.support.vision_models import draw_image, save_vision_policy

# The names of the files in the folder of the inputs.
MODEL, TRAIN, VAL = "vision", "images-train.parquet", "images-val.parquet"
MAX_PROMPT_LENGTH = 64
_SIDES = (28, 56, 84)


def write_image_inputs(folder: Path) -> None:
    """Writes a vision policy, 16 training and 8 validation prompts; some of them have no image, and some the same."""
    save_vision_policy(folder / MODEL)
    draws = random.Random(shifted(0))
    for name, num_rows in ((TRAIN, 16), (VAL, 8)):
        rows = [_row(number, draws) for number in range(num_rows)]
        pq.write_table(pa.Table.from_pylist(rows), folder / name)


def image_config(inputs: Inputs) -> dict[str, Any]:
    """Returns the configuration of a run with images, without its folder: that of `Inputs` with another model."""
    folder = inputs.folder
    if not (folder / MODEL).exists():
        write_image_inputs(folder)
    config = inputs.config()
    data = {
        "train_files": str(folder / TRAIN),
        "val_files": str(folder / VAL),
        "max_prompt_length": MAX_PROMPT_LENGTH,
    }
    model = {"model": str(folder / MODEL)}
    return {
        **config,
        "data": config["data"] | data,
        "actor": config["actor"] | model,
        "critic": config["critic"] | model,
    }


def _row(number: int, draws: random.Random) -> dict[str, Any]:
    letters = "".join(draws.sample("abcdefghij", 4))
    num_images = number % 4
    images = [
        {"bytes": draw_image(draws.randrange(6), draws.choice(_SIDES), draws.choice(_SIDES)), "path": None}
        for _ in range(num_images)
    ]
    return {
        "prompt": [{"role": "user", "content": f"{'<image>' * num_images}sort {letters}"}],
        "data_source": "letters",
        "reward_model": {"style": "rule", "ground_truth": letters},
        "images": images or None,
    }
