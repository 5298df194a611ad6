"""Makes the images of rows into tensors: pixels of each distinct image, and the places in the prompts that take them.

An image token is found by its place in the prompt, never by its id alone: a model may sample this id like any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from services.engine.batching.decoded_images import decoded_images
from services.engine.batching.on_device import on_device
from splitppo.batch import Array, Batch
from splitppo.images.columns import RowImage, images_of_row
from splitppo.images.grid import num_image_tokens
from splitppo.images.pixels import make_patches
from splitppo.images.positions import image_positions, image_starts
from splitppo.images.settings import ImageSettings

RowImages = Sequence[RowImage]


@dataclass(frozen=True, eq=False)
class MicroBatchImages:
    """The images of rows that go through a model together, on its device. An image that rows share is there once.

    Attributes:
        pixels: [patches of all distinct images, values of a patch] float32.
        grids: [num distinct images, 3] int64: 1 (frame), rows and columns of patches.
        places: [P] int64, ascending: the image tokens of all rows, as indices into the flattened token ids.
        features: [P] int64: the token of the distinct images, counted over all of them, that each place takes.
    """

    pixels: Tensor
    grids: Tensor
    places: Tensor
    features: Tensor

    @classmethod
    def of(
        cls,
        prompts: Sequence[Array],
        images: Sequence[RowImages],
        starts: Sequence[int] | NDArray[np.int64],
        settings: ImageSettings,
        device: torch.device,
    ) -> Self | None:
        """Decodes the images of rows and divides them into patches; None if no row has an image.

        `starts` are the places of the first tokens of the prompts among the flattened token ids, ascending.

        Raises:
            ValueError: see `image_patches`.
        """
        first_features: dict[str, int] = {}
        num_features = 0
        pixels: list[NDArray[np.float32]] = []
        grids: list[tuple[int, int, int]] = []
        places: list[NDArray[np.int64]] = []
        features: list[NDArray[np.int64]] = []
        for prompt, of_row, start_of_row in zip(prompts, images, starts, strict=True):
            starts_of_images = image_starts(prompt, _grids(of_row), settings) if of_row else ()
            for image, start in zip(of_row, starts_of_images, strict=True):
                name = image_name(image)
                tokens = np.arange(num_image_tokens(image.rows, image.columns, settings))
                if name not in first_features:
                    first_features[name] = num_features
                    num_features += len(tokens)
                    pixels.append(image_patches(image, settings, name))
                    grids.append((1, image.rows, image.columns))
                places.append(start_of_row + start + tokens)
                features.append(first_features[name] + tokens)
        if not places:
            return None
        return cls(
            on_device(np.concatenate(pixels), device),
            on_device(np.array(grids, np.int64), device),
            on_device(np.concatenate(places), device),
            on_device(np.concatenate(features), device),
        )

    @classmethod
    def without_places(cls, tower: Any, device: torch.device) -> Self:
        """Makes the smallest image that a vision tower with this configuration reads; no token takes its feature."""
        merge = tower.spatial_merge_size
        patch_dim = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(
            torch.zeros(merge * merge, patch_dim, device=device),
            torch.tensor([[1, merge, merge]], device=device),
            none,
            none,
        )


def images_of_rows(batch: Batch) -> list[RowImages]:
    """Returns the images of each row of a batch; without the column `images` no row has one."""
    if "images" not in batch:
        return [()] * batch.num_rows
    return [
        images_of_row(files, sizes)
        for files, sizes in zip(batch["images"].rows(), batch["image_sizes"].rows(), strict=True)
    ]


def positions_in_images(
    positions: NDArray[np.int64], starts: NDArray[np.int64], batch: Batch, settings: ImageSettings
) -> NDArray[np.int64]:
    """Returns the positions of tokens in time, height and width, [3, tokens], from those in their rows, [tokens].

    All three are those in the row until its first image; for what follows see `image_positions`. `starts` are the
    places of the rows' first tokens.
    """
    in_space = np.repeat(positions[None], 3, axis=0)
    lengths = batch["responses"].lengths
    for prompt, images, start, num_response in zip(
        batch["prompts"].rows(), images_of_rows(batch), starts, lengths, strict=True
    ):
        if images:
            of_prompt = image_positions(prompt, _grids(images), settings)
            response = int(start) + len(prompt)
            in_space[:, start:response] = of_prompt
            in_space[:, response : response + num_response] = of_prompt.max() + 1 + np.arange(num_response)
    return in_space


def _grids(images: RowImages) -> list[tuple[int, int]]:
    return [(image.rows, image.columns) for image in images]


def image_name(image: RowImage) -> str:
    """Returns the XXH3-128 of an image's file, in hexadecimal: the name of the image in the controller, too."""
    return xxhash.xxh3_128_hexdigest(image.data)


def image_patches(image: RowImage, settings: ImageSettings, name: str | None = None) -> NDArray[np.float32]:
    """Decodes an image, unless that was done before, and divides it into patches, [patches, values of a patch] float32.

    `name` is that of `image_name`, if it is known.

    Raises:
        ValueError: the image cannot be decoded, or has another size than was counted; the message has its name.
    """
    name = name or image_name(image)
    try:
        rgb = decoded_images().rgb(name, image.data)
        return make_patches(rgb, (image.rows, image.columns), settings)
    except ValueError as error:
        raise ValueError(f"image {name} {error}") from error
