"""Tiny random models that read images, as folders that transformers' own processor and model classes load."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.support.models import SIZES, VOCABULARY, of_transformers, save_random, save_shapes_of, save_tokenizer
from tests.support.seeds import shifted

Family = Literal["qwen2_5_vl", "qwen3_vl"]
FAMILIES: tuple[Family, ...] = ("qwen2_5_vl", "qwen3_vl")
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
VISION_SPECIAL = (VISION_START, VISION_END, IMAGE, VIDEO)
VISION_VOCABULARY = (*VOCABULARY, *VISION_SPECIAL)
# Of 2 x 2 patches, the fewest that give a token, to 8 x 8.
MIN_TOKENS, MAX_TOKENS = 1, 16

# Parts of a message become what the model reads; the processor repeats the placeholder.
VISION_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)

_TEXT: dict[str, Any] = {**SIZES, "vocab_size": len(VISION_VOCABULARY)}
_TEXTS: Mapping[Family, dict[str, Any]] = {
    "qwen2_5_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}},
    "qwen3_vl": {
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
}
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": SIZES["hidden_size"],
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_TOWERS: Mapping[Family, dict[str, Any]] = {
    # A window of 4 x 4 patches in the first and the last layer, every patch in the middle one.
    "qwen2_5_vl": {"depth": 3, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"depth": 3, "patch_size": 16, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
}
_CLASSES: Mapping[Family, tuple[str, str, str]] = {
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", "Qwen2_5_VLProcessor"),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", "Qwen3VLProcessor"),
}


def save_vision_policy(
    folder: Path,
    family: Family = "qwen2_5_vl",
    *,
    seed: int = 0,
    vision: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Writes a random model that reads images, with tokenizer and image settings; returns the folder.

    Args:
        folder: made if it is missing.
        family: Qwen2.5-VL has patches of 14 pixels and windows, Qwen3-VL patches of 16 pixels and deepstack features.
        seed: of the weights.
        vision: changes to the vision tower's configuration.
        **changes: changes to the language model's configuration.
    """
    model_class, config_class, _ = _CLASSES[family]
    save_random(of_transformers(model_class), _config(config_class, family, vision or {}, changes), folder, seed=seed)
    save_tokenizer(
        folder, vocabulary=VISION_VOCABULARY, chat_template=VISION_CHAT_TEMPLATE, more_special=VISION_SPECIAL
    )
    save_image_settings(folder, family)
    return folder


def save_vision_shapes(
    folder: Path, family: Family = "qwen2_5_vl", *, vision: Mapping[str, Any] | None = None, **changes: Any
) -> Path:
    """Writes the description of a model of any size that reads images, with a weight file that is one hole."""
    model_class, config_class, _ = _CLASSES[family]
    save_shapes_of(of_transformers(model_class), _config(config_class, family, vision or {}, changes), folder)
    save_image_settings(folder, family)
    return folder


def load_processor(folder: Path) -> Any:
    """Returns transformers' own processor of a model's folder, for images and texts.

    `AutoProcessor` makes a part for videos too, which needs torchvision; images are read by Pillow without it.
    """
    tokenizer = of_transformers("AutoTokenizer").from_pretrained(folder)
    images = of_transformers("AutoImageProcessor").from_pretrained(folder)
    class_name = json.loads((folder / "preprocessor_config.json").read_text())["processor_class"]

    class WithoutVideos(of_transformers(class_name)):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            assert argument_name != "video_processor" or argument is None

    return WithoutVideos(images, tokenizer, None, chat_template=tokenizer.chat_template)


def draw_image(seed: int, width: int, height: int, file_format: str = "PNG") -> bytes:
    """Returns the file of an image of smooth random colours: equal arguments, equal bytes."""
    from PIL import Image

    rng = np.random.default_rng(shifted(seed))
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(file, file_format)
    return file.getvalue()


def _config(config_class: str, family: Family, vision: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    text = {**_TEXT, **_TEXTS[family], **changes}
    return of_transformers(config_class)(
        text_config=text,
        vision_config={**_TOWER, **_TOWERS[family], **vision},
        tie_word_embeddings=text["tie_word_embeddings"],
        vision_start_token_id=VISION_VOCABULARY.index(VISION_START),
        vision_end_token_id=VISION_VOCABULARY.index(VISION_END),
        image_token_id=VISION_VOCABULARY.index(IMAGE),
        video_token_id=VISION_VOCABULARY.index(VIDEO),
    )


def save_image_settings(folder: Path, family: Family) -> None:
    """Writes preprocessor_config.json with the keys that the family's models on the hub have."""
    patch_size = _TOWERS[family]["patch_size"]
    token_pixels = (2 * patch_size) ** 2
    fewest, most = MIN_TOKENS * token_pixels, MAX_TOKENS * token_pixels
    settings: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": _CLASSES[family][2],
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    if family == "qwen2_5_vl":
        settings |= {"min_pixels": fewest, "max_pixels": most}
        settings |= {"image_mean": [0.48145466, 0.4578275, 0.40821073]}
        settings |= {"image_std": [0.26862954, 0.26130258, 0.27577711]}
    else:
        settings |= {"size": {"shortest_edge": fewest, "longest_edge": most}}
        settings |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))
