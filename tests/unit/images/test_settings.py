"""What a model expects of images is read from the files of its folder, in the forms that they have had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from splitppo.images.settings import ImageSettings, read_image_settings

CONFIG: dict[str, Any] = {"model_type": "qwen2_5_vl", "vision_config": {}, "image_token_id": 5}
# As the hub has it for Qwen2.5-VL.
PROCESSOR: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.1, 0.2, 0.3],
    "image_std": [0.4, 0.5, 0.6],
}


def folder_with(tmp_path: Path, config: dict[str, Any], processor: dict[str, Any] | None = None) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    return tmp_path


def settings_of(
    tmp_path: Path, config: dict[str, Any] = CONFIG, processor: dict[str, Any] = PROCESSOR
) -> ImageSettings:
    settings = read_image_settings(folder_with(tmp_path, config, processor))
    assert settings is not None
    return settings


def test_a_model_without_a_tower_has_none(tmp_path: Path) -> None:
    assert read_image_settings(folder_with(tmp_path, {"model_type": "qwen2"})) is None


def test_all_that_the_hub_has_is_read(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)

    assert settings == ImageSettings(
        family="qwen2_5_vl",
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=3136,
        max_pixels=12845056,
        image_mean=(0.1, 0.2, 0.3),
        image_std=(0.4, 0.5, 0.6),
        resample=3,
        rescale_factor=1 / 255,
        image_token_id=5,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
    )
    assert settings.patch_dim == 1176
    assert settings.merged == 4


def test_newer_names_of_the_limits_are_read(tmp_path: Path) -> None:
    processor = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16}

    settings = settings_of(tmp_path, {**CONFIG, "model_type": "qwen3_vl"}, processor)

    assert (settings.min_pixels, settings.max_pixels) == (65536, 16777216)
    assert settings.patch_dim == 1536


def test_where_both_names_are_there_the_older_ones_count_as_in_transformers(tmp_path: Path) -> None:
    processor = {**PROCESSOR, "min_pixels": 4000, "size": {"shortest_edge": 1, "longest_edge": 2}}

    assert settings_of(tmp_path, processor=processor).min_pixels == 4000


def test_the_file_of_the_whole_processor_is_read_first(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {**PROCESSOR, "min_pixels": 5000}}))

    assert settings_of(tmp_path).min_pixels == 5000


def test_limits_of_the_run_take_the_place_of_those_of_the_folder(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CONFIG, PROCESSOR)

    settings = read_image_settings(folder, min_pixels=100, max_pixels=200)

    assert settings is not None
    assert (settings.min_pixels, settings.max_pixels) == (100, 200)
    with pytest.raises(ValueError, match="expected 1 <= min_pixels <= max_pixels, got 3136 and 200"):
        read_image_settings(folder, max_pixels=200)


@pytest.mark.parametrize(
    ("config", "processor", "sentence"),
    [
        ({"model_type": "smolvlm"}, {}, "models of the types qwen2_5_vl and qwen3_vl, this one is 'smolvlm'"),
        ({"vision_config": {"patch_size": "14"}}, {}, 'expected patch_size to be a whole number above 0, got "14"'),
        ({"vision_config": {"patch_size": 0}}, {}, "expected patch_size to be a whole number above 0, got 0"),
        ({"vision_config": {"spatial_merge_size": 0}}, {}, "expected spatial_merge_size to be a whole number above 0"),
        ({"image_token_id": -1}, {}, "expected image_token_id to be a whole number, got -1"),
        ({}, {"patch_size": 16}, "patch_size is 16, but patch_size in config.json is 14"),
        ({}, {"merge_size": 4}, "merge_size is 4, but spatial_merge_size in config.json is 2"),
        ({}, {"do_normalize": False}, "expected do_normalize to be true, got false"),
        ({}, {"resample": 9}, "expected resample to be from 0 to 5, got 9"),
        ({}, {"rescale_factor": None}, "expected rescale_factor to be a number, got null"),
        ({}, {"rescale_factor": float("nan")}, "expected rescale_factor to be a number, got NaN"),
        ({}, {"image_mean": [10**400, 0, 0]}, "expected image_mean to be three numbers, got"),
        (
            {},
            {"image_std": [float("inf"), 1, 1]},
            r"expected image_std to be three numbers above 0, got \[Infinity, 1, 1\]",
        ),
        ({}, {"image_std": [0, 1, 1]}, r"expected image_std to be three numbers above 0, got \[0, 1, 1\]"),
        ({}, {"image_mean": [0.5]}, r"expected image_mean to be three numbers, got \[0.5\]"),
        ({}, {"min_pixels": 0}, "expected 1 <= min_pixels <= max_pixels, got 0"),
        ({}, {"max_pixels": 3.5}, "expected max_pixels to be a whole number, got 3.5"),
    ],
)
def test_what_cannot_be_used_is_refused(
    tmp_path: Path, config: dict[str, Any], processor: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        settings_of(tmp_path, {**CONFIG, **config}, {**PROCESSOR, **processor})


def test_a_folder_without_image_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"preprocessor_config.json does not exist"):
        read_image_settings(folder_with(tmp_path, CONFIG))
