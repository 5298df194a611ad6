"""The task of read_digits: its images, its files, and the model that it begins with."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForImageTextToText

from controller.data.prompts import load_prompts
from controller.data.tokenizer import load_tokenizer
from controller.models.vision import VisionInput
from recipes.read_digits import task, warm_start
from recipes.read_digits.prepare import RECIPE, prepare
from recipes.warm_start import IGNORED
from rewards.scorers.read_digits import compute_score
from splitppo.config import DataConfig, load_config
from splitppo.images.grid import num_image_tokens, patch_grid
from splitppo.images.headers import read_header
from splitppo.images.pixels import decode_rgb
from splitppo.images.settings import read_image_settings
from tests.support.recipes import is_made_by_its_seed
from tests.support.vision_models import load_processor

FILES = ("train", "val", "shuffled/train", "shuffled/val")


@pytest.fixture(scope="module", autouse=True)
def few_images() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(task, "NUM_TRAIN_IMAGES", 300)
        patched.setattr(task, "NUM_VAL_IMAGES", 50)
        yield


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, few_images: Any) -> Path:
    output = tmp_path_factory.mktemp("prepared") / "read_digits"
    prepare(output, warm_start_steps=1)
    return output


def rows_of(file: Path) -> list[dict[str, Any]]:
    return pq.read_table(file).to_pylist()


def test_every_digit_is_drawn_about_as_often_and_no_image_twice() -> None:
    rng = np.random.default_rng(0)
    drawn = [task.draw(rng) for _ in range(1000)]
    counts = Counter(one.digit for one in drawn)
    assert set(counts) == set(range(10))
    assert min(counts.values()) > 60
    assert len({one.rgb.tobytes() for one in drawn}) == 1000
    assert {one.rgb.shape for one in drawn} == {(32, 32, 3)}


def test_ink_and_paper_differ_in_every_image() -> None:
    rng = np.random.default_rng(0)
    grey = np.array([task.draw(rng).rgb.mean(axis=-1) for _ in range(200)])
    assert (grey.std(axis=(1, 2)) > 2 * task.NOISE).all()


def test_a_row_has_verls_schema_and_the_drawn_image() -> None:
    drawn = task.draw(np.random.default_rng(0))
    [row] = task.rows_of([drawn.digit], [task.png_of(drawn.rgb)], "train")
    assert row["prompt"] == [{"role": "user", "content": "<image>digit:"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": str(drawn.digit)}
    [image] = row["images"]
    assert image.keys() == {"bytes", "path"}
    assert (decode_rgb(image["bytes"]) == drawn.rgb).all()


@pytest.mark.parametrize(("response", "score"), [("7", 1.0), (" 7\n", 1.0), ("8", 0.0), ("77", 0.0), ("", 0.0)])
def test_the_digit_alone_is_right(response: str, score: float) -> None:
    assert compute_score("read_digits", response, "7") == score


def test_shuffled_rows_are_the_same_rows_with_the_images_of_others(prepared: Path) -> None:
    for split in ("train", "val"):
        rows = rows_of(prepared / f"{split}.parquet")
        shuffled = rows_of(prepared / "shuffled" / f"{split}.parquet")
        own = [row.pop("images")[0]["bytes"] for row in rows]
        others = [row.pop("images")[0]["bytes"] for row in shuffled]
        assert rows == shuffled
        assert sorted(own) == sorted(others)
        assert sum(one == other for one, other in zip(own, others, strict=True)) < 5


def test_an_image_has_sixteen_tokens_and_the_prompt_fits_the_positions_of_the_model(prepared: Path) -> None:
    settings = read_image_settings(prepared / "model")
    assert settings is not None
    for row in rows_of(prepared / "val.parquet"):
        header = read_header(row["images"][0]["bytes"])
        assert num_image_tokens(*patch_grid(header.width, header.height, settings), settings) == 16


def test_the_warm_start_gives_the_model_what_transformers_processor_would(prepared: Path) -> None:
    """Ids, pixels and positions: the loss is that of transformers' own way to call the model."""
    settings = read_image_settings(prepared / "model")
    assert settings is not None
    model = AutoModelForImageTextToText.from_pretrained(prepared / "model")
    processor = load_processor(prepared / "model")
    eos = model.config.text_config.eos_token_id
    batch = next(warm_start.batches(prepared / "model", settings, eos, np.random.default_rng(3)))
    rng = np.random.default_rng(3)
    drawn = [task.draw(rng) for _ in range(len(batch["labels"]))]
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "digit:"}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    texts = [f"{prompt}{one.digit}<|im_end|>" for one in drawn]
    theirs = processor(text=texts, images=[one.rgb for one in drawn], return_tensors="pt")

    assert torch.equal(batch["input_ids"], theirs["input_ids"])
    assert torch.equal(batch["pixel_values"], theirs["pixel_values"])
    labels = torch.where(
        torch.arange(theirs["input_ids"].shape[1]) < theirs["input_ids"].shape[1] - 2, IGNORED, theirs["input_ids"]
    )
    assert torch.equal(batch["labels"], labels)
    with torch.no_grad():
        ours = model(**batch).loss
        assert ours == pytest.approx(model(**theirs, labels=labels).loss.item(), abs=1e-6)


def test_what_is_prepared_is_a_function_of_the_seed(prepared: Path, tmp_path: Path) -> None:
    is_made_by_its_seed(prepare, prepared, tmp_path, [f"{file}.parquet" for file in FILES])


def test_the_config_reads_what_prepare_makes_by_default() -> None:
    config = load_config(RECIPE.config_file)
    assert {config.actor.model, *config.data.train_files, *config.data.val_files} == {
        str(RECIPE.output / name) for name in ("model", "train.parquet", "val.parquet")
    }
    assert not config.actor.freeze_vision_tower
    assert not config.critic.freeze_vision_tower


def test_every_prompt_and_response_fits_the_lengths_of_the_config_and_the_model(prepared: Path) -> None:
    config = load_config(RECIPE.config_file)
    table = load_prompts(
        replace_files(config.data, prepared),
        load_tokenizer(str(prepared / "model")),
        "train",
        vision=VisionInput(read_image_settings(prepared / "model")),
    )
    assert table.num_prompts == task.NUM_TRAIN_IMAGES
    lengths = table.prompts.lengths
    assert lengths.min() == lengths.max() <= config.data.max_prompt_length
    positions = json.loads((prepared / "model/config.json").read_text())["text_config"]["max_position_embeddings"]
    assert config.data.max_prompt_length + config.data.max_response_length <= positions


def test_the_controller_gives_the_prompt_that_the_model_was_trained_on(prepared: Path) -> None:
    settings = read_image_settings(prepared / "model")
    assert settings is not None
    config = load_config(RECIPE.config_file)
    tokenizer = load_tokenizer(str(prepared / "model"))
    table = load_prompts(replace_files(config.data, prepared), tokenizer, "train", vision=VisionInput(settings))
    batch = next(warm_start.batches(prepared / "model", settings, 2, np.random.default_rng(0)))
    assert table.prompts.rows()[0].tolist() == batch["input_ids"][0, :-2].tolist()


def replace_files(data: DataConfig, prepared: Path) -> DataConfig:
    return data.model_copy(update={"train_files": (str(prepared / "train.parquet"),)})
