"""Rows whose images cannot be read: each is refused in one sentence with its place."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from controller.data.chat_template import ChatTemplate
from controller.data.prompts import load_prompts
from controller.data.template_process import Template
from controller.data.tokenizer import Tokenizer, load_tokenizer
from controller.models.vision import VisionInput, read_vision_input
from splitppo.config import ConfigError, DataConfig
from splitppo.images.settings import read_image_settings
from tests.support.fake_services import make_config
from tests.support.model_folders import write_model
from tests.support.vision_folders import image_row, load_with_images, write_vision_folder
from tests.support.vision_models import draw_image

DIGIT = draw_image(7, 28, 28)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_vision_folder(tmp_path / "model")


def header_alone(width: int, height: int) -> bytes:
    """A PNG that is whole by its chunks and has none of the pixels that its header promises."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def gif() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (28, 28)).save(file, "GIF")
    return file.getvalue()


def write(file: Path, *rows: Any) -> Path:
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist([*rows]), file)
    return file


def encoded(*images: bytes) -> list[dict[str, Any]]:
    return [{"bytes": image, "path": None} for image in images]


@pytest.mark.parametrize(
    ("text", "images", "sentence"),
    [
        ("<image>a<image>", encoded(DIGIT), "the prompt has 2 <image>, column 'images' has 1 image"),
        ("<image>", encoded(DIGIT, DIGIT), "the prompt has 1 <image>, column 'images' has 2 images"),
        ("a", encoded(DIGIT), "the prompt has no <image>, column 'images' has 1 image"),
        ("<image>", [], "the prompt has 1 <image>, column 'images' has no images"),
        ("<image>", None, "the prompt has 1 <image>, column 'images' has no images"),
        ("<image>", encoded(gif()), "image 1 is no PNG, JPEG or WebP"),
        ("<image>", encoded(b""), "image 1 is no PNG, JPEG or WebP"),
        ("<image><image>", encoded(DIGIT, DIGIT[:40]), "image 2 is truncated"),
        ("<image>", encoded(header_alone(10_000, 9_000)), "image 1 has 90 megapixels, at most 64 are read"),
        ("<image>", encoded(header_alone(10_000, 10_000)), "image 1 has 100 megapixels, at most 64 are read"),
        ("<image>", encoded(header_alone(3_000, 10)), "image 1 is 300 times as wide as high, at most 200"),
        ("<image>", encoded(header_alone(10, 3_000)), "image 1 is 300 times as high as wide, at most 200"),
        ("<image>", encoded(DIGIT.ljust(1_500_000)), "image 1 has 1.5 MB, data.max_image_bytes is 1 MB$"),
        ("<image><|image_pad|>", encoded(DIGIT), r"the text holds <\|image_pad\|> itself"),
        ("<|image_pad|>", None, r"the text holds <\|image_pad\|> itself"),
        ("<video>", encoded(DIGIT), "the prompt has '<video>'; models are trained on texts and images alone here"),
        ("<image>", [{"bytes": None, "path": None}], "image 1 must be {bytes, path} or a path, got neither"),
        ("<image>", [{"path": "absent.png"}], "image 1: no such file .*absent.png"),
        ("<image>", [{"path": "~no.such.user/a.png"}], "image 1: .* names the home of a user who is not known$"),
        ("<image>", [{"path": "a" * 5000}], "image 1: .{300,450} cannot be read: File name too long$"),
        ("<image>", [{"bytes": "iVBORw0KGgo="}], "image 1: expected 'bytes' to be bytes, got str$"),
        ("<image>", "a.png", "column 'images' must be a list of {bytes, path} or of paths, got str"),
    ],
)
def test_a_wrong_row_is_refused_with_its_place(
    tmp_path: Path, model: str, text: str, images: Any, sentence: str
) -> None:
    rows = [image_row(text, images)]
    good = [image_row("<image>", encoded(DIGIT)), image_row("a", [])]
    files = [write(tmp_path / "first.parquet", *good), write(tmp_path / "second.parquet", *rows)]
    config = DataConfig(train_files=tuple(map(str, files)), train_batch_size=1, max_image_bytes=1_000_000)
    vision = VisionInput(read_image_settings(Path(model)))
    with pytest.raises(ConfigError, match=rf"^{files[1]}, row 1: {sentence}"):
        load_prompts(config, load_tokenizer(model), "train", vision=vision)


def test_a_file_of_many_bytes_is_refused_before_it_is_read(tmp_path: Path, model: str) -> None:
    with (tmp_path / "large.png").open("wb") as file:
        os.truncate(file.fileno(), 31_000_000)
    data = write(tmp_path / "train.jsonl", image_row("<image>", ["large.png"]))
    sentence = "line 1: image 1 has 31 MB, data.max_image_bytes is 20 MB$"
    with pytest.raises(ConfigError, match=sentence):
        load_with_images(model, data)


def test_paths_that_are_no_files_are_refused(tmp_path: Path, model: str) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for path in ("pipe.png", "/dev/zero", "."):
        data = write(tmp_path / "train.jsonl", image_row("<image>", [path]))
        with pytest.raises(ConfigError, match=r"line 1: image 1: .* is no plain file$"):
            load_with_images(model, data)
    for entry, kind in ((7, "int"), (["a.png"], "list"), (None, "NoneType")):
        data = write(tmp_path / "train.jsonl", image_row("<image>", [entry]))
        with pytest.raises(ConfigError, match=rf"line 1: image 1 must be {{bytes, path}} or a path, got {kind}"):
            load_with_images(model, data)


@pytest.mark.parametrize(
    ("prompt", "images", "sentence"),
    [
        ("<image>?", ["a.png"], "column 'images' is not empty, but the prompt is plain text; expected chat messages"),
        ("<image>?", [], "the prompt has 1 <image>, column 'images' has no images"),
        ([{"type": "image", "image": "a.png"}], ["a.png"], "a part of type 'image' with 'image'; images come from col"),
        ([{"type": "image_url"}], ["a.png"], "the prompt has a part of type 'image_url'"),
    ],
)
def test_a_prompt_that_holds_images_otherwise_is_refused(
    tmp_path: Path, model: str, prompt: Any, images: Any, sentence: str
) -> None:
    (tmp_path / "a.png").write_bytes(DIGIT)
    messages = prompt if isinstance(prompt, str) else [{"role": "user", "content": prompt}]
    row = image_row("", images) | {"prompt": messages}
    data = write(tmp_path / "train.jsonl", image_row("a", None), row)
    with pytest.raises(ConfigError, match=f"line 2: .*{sentence}"):
        load_with_images(model, data)


@pytest.mark.parametrize("content", [["a.mp4"], "a.mp4", {"path": "a.mp4"}, 5, False])
@pytest.mark.parametrize("column", ["videos", "audios"])
def test_videos_and_sounds_are_refused(tmp_path: Path, model: str, column: str, content: Any) -> None:
    data = write(tmp_path / "train.jsonl", image_row("a", None, **{column: content}))
    with pytest.raises(ConfigError, match=f"line 1: column '{column}' is not empty; models are trained on texts and"):
        load_with_images(model, data)


@pytest.mark.parametrize("content", [None, [], "", {}, float("nan")])
def test_a_row_without_videos_is_read(tmp_path: Path, model: str, content: Any) -> None:
    data = write(tmp_path / "train.jsonl", image_row("a", None, videos=content))
    assert load_with_images(model, data).num_prompts == 1


def test_signs_are_text_in_a_file_without_a_column_for_images(tmp_path: Path, model: str) -> None:
    row = image_row("what does <image> do?", None)
    del row["images"]
    batch = load_with_images(model, write(tmp_path / "train.jsonl", row))
    assert batch.rows[0].prompt == row["prompt"]
    assert batch.images is None


# Truncation.


@pytest.mark.parametrize(
    ("truncation", "text", "cut"),
    [
        ("left", "<image>abcdefgh", 1),
        ("right", "abcdefgh<image>", 1),
        ("middle", "abcd<image>efgh", 1),
        ("left", "<image>ab<image>", 1),
        ("right", "<image>ab<image>", 2),
        ("left", "abcdefgh<image>", None),
        ("right", "<image>abcdefgh", None),
        ("middle", "<image>abcdefgh<image>", None),
    ],
)
def test_truncation_never_cuts_an_image(
    tmp_path: Path, model: str, truncation: Any, text: str, cut: int | None
) -> None:
    images = encoded(*[DIGIT] * text.count("<image>"))
    data = write(tmp_path / "train.parquet", image_row(text, images))
    whole = load_with_images(model, data)
    limit = len(whole.prompts.values) - 4
    settings = {"max_prompt_length": limit, "filter_overlong_prompts": False, "truncation": truncation}
    if cut is None:
        batch = load_with_images(model, data, **settings)
        assert len(batch.prompts.values) == limit
        return
    sentence = rf"row 1: truncation '{truncation}' would cut image {cut}; raise data.max_prompt_length or lower data."
    with pytest.raises(ConfigError, match=sentence):
        load_with_images(model, data, **settings)


def test_truncation_keeps_the_tokens_around_an_image(tmp_path: Path, model: str) -> None:
    data = write(tmp_path / "train.parquet", image_row("abc<image>", encoded(DIGIT)))
    whole = len(load_with_images(model, data).prompts.values)  # u : a b c and then the image with its two neighbours
    settings = {"filter_overlong_prompts": False, "truncation": "left"}
    load_with_images(model, data, max_prompt_length=whole - 5, **settings)
    with pytest.raises(ConfigError, match="would cut image 1"):
        load_with_images(model, data, max_prompt_length=whole - 6, **settings)


def test_prompts_are_filtered_by_their_length_with_images(tmp_path: Path, model: str) -> None:
    large = draw_image(1, 28 * 4, 28 * 4)
    data = write(tmp_path / "train.parquet", image_row("<image>", encoded(large)), image_row("<image>", encoded(DIGIT)))
    batch = load_with_images(model, data, max_prompt_length=16)
    assert [row.images.num_tokens for row in batch.rows] == [(1,)]


# Models and tokenizers.


def test_a_chat_template_that_does_not_place_images_is_refused(tmp_path: Path, model: str) -> None:
    data = write(tmp_path / "train.parquet", image_row("<image>a", encoded(DIGIT)))
    config = DataConfig(train_files=(str(data),), train_batch_size=1)
    vision = VisionInput(read_image_settings(Path(model)))
    backend = load_tokenizer(model).backend
    for template, number in (("a", 0), ("{% for _ in [1, 2] %}<|image_pad|>{% endfor %}", 2)):
        tokenizer = Tokenizer(backend, (), ChatTemplate(Template(template)))
        sentence = rf"row 1: the chat template writes {number} <\|image_pad\|>; expected one for each of 1 images"
        with pytest.raises(ConfigError, match=sentence):
            load_prompts(config, tokenizer, "train", vision=vision)


def test_a_tokenizer_without_the_token_of_images_is_refused(tmp_path: Path, model: str) -> None:
    other = write_vision_folder(tmp_path / "other", image_token_id=5_000)
    data = write(tmp_path / "train.parquet", image_row("<image>a", encoded(DIGIT)))
    with pytest.raises(ConfigError, match=r"^data\.tokenizer: it has no token of id 5000, which stands for images"):
        load_with_images(other, data)


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [
        ("text", "actor.model has no vision tower, but column 'images' is not empty"),
        ("gemma", r"actor\.model reads no images here \(.*qwen2_5_vl and qwen3_vl, .*\), but column 'images' is not"),
    ],
)
def test_a_model_that_reads_no_images_refuses_rows_with_images_alone(
    tmp_path: Path, folder: str, sentence: str
) -> None:
    model = (
        write_model(tmp_path / "text")
        if folder == "text"
        else write_vision_folder(tmp_path / "gemma", model_type="gemma3")
    )
    vision = read_vision_input(make_config(tmp_path / "run", actor__model=model, data__tokenizer=model))
    with_image = write(tmp_path / "a.parquet", image_row("a", None), image_row("<image>", encoded(DIGIT)))
    alone = write(tmp_path / "b.parquet", {**image_row("", []), "prompt": "abc"})
    tokenizer = load_tokenizer(model)
    with pytest.raises(ConfigError, match=f"a.parquet, row 2: {sentence}"):
        load_prompts(DataConfig(train_files=(str(with_image),), train_batch_size=1), tokenizer, "train", vision=vision)
    batch = load_prompts(DataConfig(train_files=(str(alone),), train_batch_size=1), tokenizer, "train", vision=vision)
    assert batch.texts == ("abc",)
