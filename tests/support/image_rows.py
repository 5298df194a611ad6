"""Rows with images for tests of the engine, and what transformers' own forward computes for them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitppo.batch import Batch
from splitppo.images.columns import row_of_images
from splitppo.images.grid import num_image_tokens, patch_grid
from splitppo.images.headers import read_header
from splitppo.images.settings import ImageSettings, read_image_settings
from tests.support.models import VOCABULARY
from tests.support.seeds import shifted
from tests.support.vision_models import IMAGE, VISION_VOCABULARY, draw_image, load_processor

IMAGE_TOKEN = VISION_VOCABULARY.index(IMAGE)
# Files of images of different sizes; the last has the size of the first, and other colours.
FILES = (
    draw_image(0, 100, 60),
    draw_image(1, 40, 90),
    draw_image(2, 64, 64, "JPEG"),
    draw_image(3, 100, 60),
)
# The images of each row by their numbers in FILES; rows of one prompt follow each other.
IMAGES_OF_ROWS = ((0,), (0,), (), (1, 2), (1, 2), (3,), (2, 0, 2))


def settings_of(folder: Path) -> ImageSettings:
    """Returns what the model of a folder expects of images."""
    settings = read_image_settings(folder)
    assert settings is not None
    return settings


def make_image_batch(
    folder: Path,
    images_of_rows: Sequence[Sequence[int]] = IMAGES_OF_ROWS,
    *,
    seed: int = 0,
    samples_image_tokens: bool = True,
) -> Batch:
    """Returns rows with these images, with advantages, returns and a mask; equal images, equal prompts.

    With `samples_image_tokens` some responses have image tokens, at their beginning, within, or at their end.
    """
    settings = settings_of(folder)
    rng = np.random.default_rng(shifted(seed))
    prompts: dict[tuple[int, ...], Any] = {}
    responses = []
    for row, images in enumerate(images_of_rows):
        prompts.setdefault(tuple(images), _prompt(rng, images, settings))
        response = rng.integers(3, len(VOCABULARY), rng.integers(3, 12))
        if samples_image_tokens:
            response[[0, len(response) // 2, -1][row % 3]] = IMAGE_TOKEN
        responses.append(response)
    files_and_sizes = [row_of_images([_counted(FILES[image], settings) for image in row]) for row in images_of_rows]
    lengths = [len(response) for response in responses]
    return Batch.from_rows(
        prompts=[prompts[tuple(images)] for images in images_of_rows],
        responses=responses,
        images=[files for files, _ in files_and_sizes],
        image_sizes=[sizes for _, sizes in files_and_sizes],
        response_mask=[np.arange(length) != 1 for length in lengths],
        advantages=[rng.normal(size=length) for length in lengths],
        returns=[rng.normal(size=length) for length in lengths],
    )


def _counted(file: bytes, settings: ImageSettings) -> tuple[bytes, int, int]:
    header = read_header(file)
    return file, *patch_grid(header.width, header.height, settings)


def _prompt(rng: np.random.Generator, images: Sequence[int], settings: ImageSettings) -> Any:
    parts = [rng.integers(3, len(VOCABULARY), rng.integers(1, 6))]
    for image in images:
        _, rows, columns = _counted(FILES[image], settings)
        tokens = [settings.image_token_id] * num_image_tokens(rows, columns, settings)
        parts += [[settings.vision_start_token_id, *tokens, settings.vision_end_token_id]]
        parts += [rng.integers(3, len(VOCABULARY), rng.integers(0, 6))]
    return np.concatenate(parts)


@dataclass
class Plain:
    """A model of transformers, which computes rows alone, with its own processor, positions and places of images.

    It would look for images at sampled image tokens, too. So these are another token here, with the same embedding: the
    model must have an output layer of its own.
    """

    model: Any
    folder: Path

    def logits(self, batch: Batch, row: int) -> Tensor:
        """Computes the logits (of a value model: the values) before each response token of a row, [T, V]."""
        from PIL import Image

        prompt = batch["prompts"].rows()[row]
        response = batch["responses"].rows()[row].copy()
        sampled = response == IMAGE_TOKEN
        response[sampled] = self._twin()
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        inputs: dict[str, Any] = {}
        files = _files(batch, row)
        if files:
            processor = load_processor(self.folder)
            images = [Image.open(io.BytesIO(file)) for file in files]
            found = processor.image_processor(images=images, return_tensors="pt")
            inputs = {"pixel_values": found["pixel_values"], "image_grid_thw": found["image_grid_thw"]}
            inputs |= {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()}
        logits = self.model(input_ids=ids, use_cache=False, **inputs).logits[0]
        before = slice(len(prompt) - 1, ids.shape[1] - 1)
        return logits[before]

    def _twin(self) -> int:
        """Returns an id that no row has, whose embedding is made that of the image token."""
        twin = len(VISION_VOCABULARY) - 1
        embedding = self.model.get_input_embeddings().weight
        with torch.no_grad():
            embedding[twin] = embedding[IMAGE_TOKEN]
        return twin

    def log_probs(self, batch: Batch, row: int, temperature: float) -> Tensor:
        """Computes the log-probs of the response tokens of a row, [T]."""
        targets = torch.from_numpy(batch["responses"].rows()[row].astype(np.int64))
        log_probs = (self.logits(batch, row) / temperature).log_softmax(-1)
        return log_probs.gather(-1, targets[:, None]).squeeze(-1)

    def values(self, batch: Batch, row: int) -> Tensor:
        """Computes the values before the response tokens of a row, [T]."""
        return self.logits(batch, row).squeeze(-1)


def _files(batch: Batch, row: int) -> list[bytes]:
    files = batch["images"].rows()[row].tobytes()
    sizes = batch["image_sizes"].rows()[row].reshape(-1, 3)[:, 0].tolist()
    ends = np.cumsum(sizes).tolist()
    return [files[end - size : end] for end, size in zip(ends, sizes, strict=True)]
