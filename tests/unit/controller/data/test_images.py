"""Prompts with images: their tokens, the columns that the worker groups get, and the file that keeps the images."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageFile
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

import splitppo.images.pixels
from controller.data.images import ImageSpool
from controller.data.prompts import PromptBatch
from splitppo.config import ConfigError
from splitppo.images.columns import images_of_row
from splitppo.images.settings import ImageSettings, read_image_settings
from tests.support.disks import fill, mounted
from tests.support.vision_folders import PATCH_SIZES, image_row, load_with_images, write_vision_folder
from tests.support.vision_models import FAMILIES, IMAGE, VISION_VOCABULARY, Family, draw_image

PLACEHOLDER = VISION_VOCABULARY.index(IMAGE)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_vision_folder(tmp_path / "model")


def parquet(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([*rows]), file)
    return file


def encoded(*images: bytes) -> list[dict[str, Any]]:
    """The images of a row as verl's parquet files have them."""
    return [{"bytes": image, "path": None} for image in images]


def files_of(batch: PromptBatch) -> list[list[bytes]]:
    """The files of the images of each prompt, as a worker group reads them."""
    assert batch.images is not None
    rows = zip(batch.images["images"].rows(), batch.images["image_sizes"].rows(), strict=True)
    return [[bytes(image.data) for image in images_of_row(files, sizes)] for files, sizes in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_a_token_for_each_merged_patch_of_its_images(tmp_path: Path, family: Family) -> None:
    model = write_vision_folder(tmp_path / family, family)
    side = 2 * PATCH_SIZES[family]
    images = draw_image(1, 3 * side, 2 * side), draw_image(2, side, side, "JPEG")
    batch = load_with_images(model, parquet(tmp_path, image_row("<image>a<image>?", encoded(*images))))
    [row] = batch.rows
    assert row.prompt == [
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {"type": "text", "text": "a"},
                {"type": "image"},
                {"type": "text", "text": "?"},
            ],
        }
    ]
    assert row.images.num_tokens == (6, 1)
    tokens = [VISION_VOCABULARY[number] for number in batch.prompts.values]
    before, after = ["<|vision_start|>"], ["<|vision_end|>"]
    assert tokens == [*"u:", *before, *[IMAGE] * 6, *after, "a", *before, IMAGE, *after, *"?\na:"]
    assert batch.texts == (
        "u:<|vision_start|><|image_pad|><|vision_end|>a<|vision_start|><|image_pad|><|vision_end|>?\na:",
    )
    assert files_of(batch) == [[*images]]
    assert batch.columns["image_sizes"].rows()[0].tolist() == [len(images[0]), 4, 6, len(images[1]), 2, 2]


def test_pixels_are_counted_within_the_limits_of_the_configuration(tmp_path: Path, model: str) -> None:
    file = parquet(tmp_path, image_row("<image>", encoded(draw_image(1, 28 * 4, 28 * 4))))
    for limits, num_tokens in (({}, 16), ({"max_pixels": 28 * 28 * 4}, 4), ({"min_pixels": 28 * 28 * 16}, 16)):
        [row] = load_with_images(model, file, **limits).rows
        assert row.images.num_tokens == (num_tokens,)


def test_images_come_from_bytes_and_from_paths_beside_the_file(tmp_path: Path, model: str) -> None:
    image = draw_image(1, 28, 28)
    folder = tmp_path / "data"
    (folder / "pictures").mkdir(parents=True)
    (folder / "pictures" / "a.png").write_bytes(image)
    rows = [image_row("<image>", [entry]) for entry in ("pictures/a.png", {"path": "pictures/a.png"})]
    rows.append(image_row("<image>", [{"bytes": None, "path": str(folder / "pictures" / "a.png")}]))
    jsonl = folder / "train.jsonl"
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = parquet(folder, image_row("<image>", ["pictures/a.png"]))
    of_bytes = parquet(tmp_path, image_row("<image>", [{"bytes": image, "path": "elsewhere.png"}]))
    assert files_of(load_with_images(model, jsonl)) == [[image]] * 3
    assert files_of(load_with_images(model, paths)) == files_of(load_with_images(model, of_bytes)) == [[image]]


def test_the_column_may_have_another_name(tmp_path: Path, model: str) -> None:
    image = draw_image(1, 28, 28)
    row = image_row("<image>", None, pictures=encoded(image))
    assert files_of(load_with_images(model, parquet(tmp_path, row), image_key="pictures")) == [[image]]


def test_a_sign_without_the_column_of_images_is_text_and_a_warning(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = parquet(tmp_path, image_row("<image>", encoded(draw_image(1, 56, 56))), image_row("a", None))
    batch = load_with_images(model, file, image_key="pics")
    assert batch.images is None
    assert "data.train_files: 1 prompts have <image>, which is text there" in caplog.text
    assert "'pics'" in caplog.text


def test_texts_need_no_token_for_images_in_the_tokenizer(tmp_path: Path, model: str) -> None:
    config = Path(model) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"image_token_id": 10_000}))
    assert load_with_images(model, parquet(tmp_path, image_row("ab", None))).images is None
    with pytest.raises(ConfigError, match="it has no token of id 10000, which stands for images"):
        load_with_images(model, parquet(tmp_path, image_row("<image>", encoded(draw_image(1, 56, 56)))))


def test_messages_with_parts_stay_as_they_are(tmp_path: Path, model: str) -> None:
    parts = [{"type": "text", "text": "a <image>"}, {"type": "image", "text": None}]
    messages = [{"role": "system", "content": [{"type": "text", "text": "b"}]}, {"role": "user", "content": parts}]
    [row] = load_with_images(model, parquet(tmp_path, image_row(messages, encoded(draw_image(1, 28, 28))))).rows
    assert row.prompt == [messages[0], {"role": "user", "content": [parts[0], {"type": "image"}]}]


def test_rows_without_images_have_empty_rows_beside_others_and_no_columns_alone(tmp_path: Path, model: str) -> None:
    image = draw_image(1, 28, 28)
    rows = [image_row("a", None), image_row("<image>", encoded(image)), image_row("b", [])]
    batch = load_with_images(model, parquet(tmp_path, *rows))
    assert files_of(batch) == [[], [image], []]
    assert files_of(batch.take(np.array([2, 0]))) == [[], []]
    assert batch.to_batch(1, 1, 2).columns.keys() == {"prompts", "images", "image_sizes", "seeds"}
    alone = load_with_images(model, parquet(tmp_path, rows[0], rows[2]))
    assert alone.images is None
    assert alone.to_batch(1, 1, 2).columns.keys() == {"prompts", "seeds"}


def test_the_images_of_a_prompt_have_their_names(tmp_path: Path, model: str) -> None:
    images = [draw_image(seed, 28, 28) for seed in range(2)]
    rows = [
        image_row("<image>b<image>", encoded(*images)),
        image_row("c", None),
        image_row("<image>", encoded(images[1])),
    ]
    table = load_with_images(model, parquet(tmp_path, *rows))
    named = [[(name, bytes(file)) for name, file in table.images_of(place)] for place in range(3)]
    first, second = [(xxhash.xxh3_128_hexdigest(image), image) for image in images]
    assert named == [[first, second], [], [second]]
    assert load_with_images(model, parquet(tmp_path, rows[1])).images_of(0) == []


def test_samples_and_joined_batches_share_the_images_of_the_table(tmp_path: Path, model: str) -> None:
    images = [draw_image(seed, 28, 28) for seed in range(3)]
    rows = [image_row("<image>", encoded(image)) for image in (*images, images[1])]
    table = load_with_images(model, parquet(tmp_path, *rows))
    batch = PromptBatch.join([table.take(np.array([3])), table.take(np.array([0]))]).repeated(2)
    assert files_of(batch) == [[images[1]]] * 2 + [[images[0]]] * 2
    assert batch.images is not None
    assert table.images is not None
    assert batch.images["images"].store is table.images["images"].store
    assert int(table.images["images"].store.lengths.sum()) == sum(map(len, images))


def test_no_image_is_decoded(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [draw_image(1, 28, 28, file_format) for file_format in ("PNG", "JPEG", "WEBP")]
    file = parquet(tmp_path, image_row("<image>" * 3, encoded(*images)))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", refuse)
    monkeypatch.setattr(PIL.Image.Image, "tobytes", refuse)
    monkeypatch.setattr(splitppo.images.pixels, "decode_rgb", refuse)
    with pytest.raises(AssertionError, match="decoded"):
        PIL.Image.open(io.BytesIO(images[0])).load()
    assert load_with_images(model, file).rows[0].images.num_tokens == (1, 1, 1)


def settings_of(model: str) -> ImageSettings:
    settings = read_image_settings(Path(model))
    assert settings is not None
    return settings


def test_the_file_of_images_has_no_name_and_cannot_be_written_through_the_columns(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    spool = ImageSpool(settings_of(model))
    rows = [spool.add([draw_image(1, 28, 28)])]
    assert [*(tmp_path / "disk").iterdir()] == []
    columns = spool.columns(rows)
    del spool
    assert not columns["images"].rows()[0].flags.writeable
    assert columns["images"].rows()[0].tobytes() == draw_image(1, 28, 28)


def test_a_full_disk_is_one_sentence(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        fill(disk, left=8192)
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        spool = ImageSpool(settings_of(model))
        with pytest.raises(ConfigError, match=f"images of the data files cannot be kept in {disk}: No space left"):
            spool.columns([spool.add([draw_image(seed, 100, 100)]) for seed in range(20)])
