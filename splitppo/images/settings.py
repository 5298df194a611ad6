"""The sizes and colours in which a vision model expects its images, from the files of its folder."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitppo.model_folder import read_json

# By family: the sizes that its configuration has in transformers where config.json has none, and its token ids.
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "qwen2_5_vl": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "qwen3_vl": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
_TOKEN_IDS = {"image_token_id": 151655, "vision_start_token_id": 151652, "vision_end_token_id": 151653}

FAMILIES = tuple(_DEFAULTS)

# What transformers' Qwen2VLImageProcessor, which serves both families, takes where the folder says nothing.
_MIN_PIXELS = 56 * 56
_MAX_PIXELS = 28 * 28 * 1280
_IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
_IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3
_FILTERS = range(6)  # Pillow's, from nearest to Hamming
_RESCALE_FACTOR = 1 / 255
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


@dataclass(frozen=True)
class ImageSettings:
    """How a vision model divides images into patches, and which tokens stand for them.

    Attributes:
        family: the model's type, "qwen2_5_vl" or "qwen3_vl".
        patch_size: width and height of a patch, in pixels.
        merge_size: a token stands for merge_size x merge_size patches.
        temporal_patch_size: frames of a patch; a still image is repeated in each.
        min_pixels, max_pixels: an image with fewer or more pixels is enlarged or reduced.
        image_mean, image_std: of red, green and blue, for pixels between 0 and 1.
        resample: Pillow's number of the filter with which images are resized.
        rescale_factor: what a pixel, from 0 to 255, is multiplied with before it is normalised.
        image_token_id: the token that stands for merged patches in the prompt.
        vision_start_token_id, vision_end_token_id: the tokens around the tokens of an image.
    """

    family: str
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    resample: int
    rescale_factor: float
    image_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int

    @property
    def patch_dim(self) -> int:
        """The number of values of a patch: three colours, frames, height and width."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def merged(self) -> int:
        """The number of patches for which one token stands."""
        return self.merge_size**2


def read_image_settings(
    folder: Path, *, min_pixels: int | None = None, max_pixels: int | None = None
) -> ImageSettings | None:
    """Reads what a model expects of images; None if config.json has no `vision_config`, so that it reads text alone.

    `min_pixels` and `max_pixels` take the place of those in the model's folder.

    Raises:
        ValueError: the model is of another family, a file cannot be read, or a value is not one that can be used.
    """
    config = read_json(folder / "config.json")
    vision = config.get("vision_config")
    if vision is None:
        return None
    family = str(config.get("model_type"))
    if not isinstance(vision, dict) or family not in FAMILIES:
        families = " and ".join(FAMILIES)
        raise ValueError(f"{folder}: images are read by models of the types {families}, this one is {family!r}")
    sizes = {
        key: _whole(folder / "config.json", key, vision.get(key, default), least=1)
        for key, default in _DEFAULTS[family].items()
    }
    tokens = {key: _whole(folder / "config.json", key, config.get(key, _TOKEN_IDS[key])) for key in _TOKEN_IDS}
    file, processor = _read_processor(folder)
    _check_processor(file, processor, sizes)
    smallest, largest = _pixel_limits(file, processor)
    settings = ImageSettings(
        family=family,
        patch_size=sizes["patch_size"],
        merge_size=sizes["spatial_merge_size"],
        temporal_patch_size=sizes["temporal_patch_size"],
        min_pixels=smallest if min_pixels is None else min_pixels,
        max_pixels=largest if max_pixels is None else max_pixels,
        image_mean=_three(file, "image_mean", processor.get("image_mean", _IMAGE_MEAN)),
        image_std=_three(file, "image_std", processor.get("image_std", _IMAGE_STD), above_0=True),
        resample=processor.get("resample", _BICUBIC),
        rescale_factor=processor.get("rescale_factor", _RESCALE_FACTOR),
        **tokens,
    )
    if not 1 <= settings.min_pixels <= settings.max_pixels:
        raise ValueError(
            f"{folder}: expected 1 <= min_pixels <= max_pixels, got {settings.min_pixels} and {settings.max_pixels}"
        )
    return settings


def _read_processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the settings of the image processor with the file that has them.

    Transformers writes them into processor_config.json, older versions into preprocessor_config.json; where both have
    them it reads the former.
    """
    together = folder / "processor_config.json"
    processor = read_json(together).get("image_processor")
    if isinstance(processor, dict):
        return together, processor
    alone = folder / "preprocessor_config.json"
    if not alone.is_file():
        raise ValueError(f"{alone} does not exist; it says how the model's images are resized and normalised")
    return alone, read_json(alone)


def _check_processor(file: Path, processor: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Raises ValueError if the processor leaves out a step, has no filter or factor, or other sizes than the model."""
    for key in _STEPS:
        if processor.get(key, True) is not True:
            raise ValueError(f"{file}: expected {key} to be true, got {json.dumps(processor[key])}")
    resample = processor.get("resample", _BICUBIC)
    if type(resample) is not int or resample not in _FILTERS:
        raise ValueError(f"{file}: expected resample to be from 0 to 5, got {json.dumps(resample)}")
    factor = processor.get("rescale_factor", _RESCALE_FACTOR)
    if not _is_number(factor):
        raise ValueError(f"{file}: expected rescale_factor to be a number, got {json.dumps(factor)}")
    for key, of_model in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        value = processor.get(key, sizes[of_model])
        if value != sizes[of_model]:
            raise ValueError(f"{file}: {key} is {value}, but {of_model} in config.json is {sizes[of_model]}")


def _pixel_limits(file: Path, processor: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the fewest and the most pixels of a resized image, by their older names if the file has these."""
    size = processor.get("size")
    if not isinstance(size, dict):
        size = {}
    limits = []
    for old_name, name, default in (
        ("min_pixels", "shortest_edge", _MIN_PIXELS),
        ("max_pixels", "longest_edge", _MAX_PIXELS),
    ):
        value = processor.get(old_name)
        if value is None:
            value = size.get(name, size.get(old_name, default))
        limits.append(_whole(file, old_name, value))
    return limits[0], limits[1]


def _whole(file: Path, key: str, value: Any, *, least: int = 0) -> int:
    """Returns the value if it is a whole number of at least `least`; ValueError with the file and its key if not."""
    if type(value) is not int or value < least:
        above = " above 0" if least else ""
        raise ValueError(f"{file}: expected {key} to be a whole number{above}, got {json.dumps(value)}")
    return value


def _is_number(value: Any) -> bool:
    """Returns True for a number that a float can be, and False for NaN and infinity, which JSON files may have."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _three(file: Path, key: str, value: Any, *, above_0: bool = False) -> tuple[float, float, float]:
    """Returns the value of each colour; ValueError with the file and its key if it is not a list of three numbers."""
    is_three = isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_number, value))
    if not is_three or (above_0 and min(value) <= 0):
        above = " above 0" if above_0 else ""
        raise ValueError(f"{file}: expected {key} to be three numbers{above}, got {json.dumps(value)}")
    red, green, blue = value
    return float(red), float(green), float(blue)
