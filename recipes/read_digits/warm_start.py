"""Makes the model that read_digits begins with: a tiny Qwen2.5-VL, trained until it reads about half of the digits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from recipes.read_digits import task
from recipes.warm_start import IGNORED, fit, random_model
from splitppo.images.grid import num_image_tokens, patch_grid
from splitppo.images.pixels import make_patches
from splitppo.images.positions import image_positions
from splitppo.images.settings import ImageSettings, read_image_settings

BATCH_SIZE = 64
# A part of an image, as `splitppo.images` describes it; the prompt has this part in place of "<image>".
_CONTENT = [{"type": "image"}, {"type": "text", "text": task.PROMPT.removeprefix("<image>")}]


def small_qwen2_5_vl(ids: dict[str, int], *, eos: str, pad: str) -> Qwen2_5_VLConfig:
    """Returns the configuration of a Qwen2.5-VL of two layers and a vision tower of two blocks.

    The first block sees windows of 4 x 4 patches, the second one the whole image.

    Args:
        ids: all tokens of the tokenizer with their ids.
        eos: the token that ends a response.
        pad: the token for padding.
    """
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(ids),
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "initializer_range": 0.08,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": ids[eos],
            "pad_token_id": ids[pad],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.08,
        },
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def train(config: Qwen2_5_VLConfig, folder: Path, num_steps: int, *, seed: int) -> PreTrainedModel:
    """Trains a random model by supervised steps on images that are drawn anew for each.

    Args:
        config: the shape of the model.
        folder: has the model's tokenizer with its chat template, and its configuration with what it expects of images.
        num_steps: the number of optimizer steps, of BATCH_SIZE images each.
        seed: of the random weights and of the images.
    """
    model = random_model(Qwen2_5_VLForConditionalGeneration, config, seed=seed)
    settings = read_image_settings(folder)
    assert settings is not None
    made = batches(folder, settings, config.text_config.eos_token_id, np.random.default_rng([seed, 1]))
    return fit(model, made, num_steps)


def batches(
    folder: Path, settings: ImageSettings, eos: int, rng: np.random.Generator
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields images with the right answers; the model learns the digit and the token that ends the response."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": _CONTENT}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    grid = patch_grid(task.IMAGE_SIDE, task.IMAGE_SIDE, settings)
    prompt = _expanded(rendered, settings.image_token_id, num_image_tokens(*grid, settings))
    digits = [tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)]
    positions = image_positions(np.array(prompt), [grid], settings)
    after = positions.max() + 1
    positions_3S = np.concatenate([positions, np.full((3, 2), after) + np.arange(2)], axis=1)
    while True:
        drawn = [task.draw(rng) for _ in range(BATCH_SIZE)]
        responses = [[digits[one.digit], eos] for one in drawn]
        patches = np.concatenate([make_patches(one.rgb, grid, settings) for one in drawn])
        yield {
            "input_ids": torch.tensor([[*prompt, *response] for response in responses]),
            "labels": torch.tensor([[IGNORED] * len(prompt) + response for response in responses]),
            "position_ids": torch.from_numpy(positions_3S)[:, None].expand(3, BATCH_SIZE, -1),
            "pixel_values": torch.from_numpy(patches),
            "image_grid_thw": torch.tensor([[1, *grid]] * BATCH_SIZE),
        }


def _expanded(ids: Sequence[int], image_token_id: int, num_tokens: int) -> list[int]:
    """Returns the ids of a prompt in which the placeholder of its image stands as often as the image has tokens."""
    place = ids.index(image_token_id)
    return [*ids[:place], *[image_token_id] * num_tokens, *ids[place + 1 :]]
