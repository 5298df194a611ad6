"""Prompts with images: sampled with the log-probs of the training forward; requests that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.engine.batching.packing import MicroBatchLimits, collate
from services.engine.model.forward import policy_forward
from services.engine.model.loading import for_generation
from services.rollout.hf_backend.backend import HfRollout
from services.rollout.hf_backend.decoding import DecodedRows
from services.rollout.hf_backend.grouped_attention import grouped_attention
from services.rollout.protocol import Sampling, begin_responses
from services.rollout.stopping import StopRule
from services.rollout.streamed_parts import response_rows
from splitppo.batch import Batch
from splitppo.v1.conversation_pb2 import Conversation
from tests.support.engines import CPU, load_model
from tests.support.image_rows import IMAGE_TOKEN, make_image_batch
from tests.support.models import save_policy
from tests.support.roles import RecordedProgress, build_actor, call, generate_request
from tests.support.vision_models import FAMILIES, save_vision_policy

# The images of each prompt: one, none, two of other sizes, two equal ones around a third.
IMAGES_OF_PROMPTS = ((0,), (), (1, 2), (3,), (2, 0, 2), (), (1,))
NUM_SAMPLES = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of models, by family."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_vision_policy(folder / family, family)
    return folder


@pytest.fixture(params=FAMILIES)
def model_folder(request: pytest.FixtureRequest, folders: Path) -> Path:
    return folders / request.param


def prompts_with_images(folder: Path, num_samples: int = NUM_SAMPLES) -> Batch:
    rows = make_image_batch(folder, IMAGES_OF_PROMPTS).select(["prompts", "images", "image_sizes"])
    seeds = np.arange(rows.num_rows * num_samples).reshape(rows.num_rows, num_samples)
    return rows.merge(Batch.from_rows(seeds=list(seeds)))


def sample(model: Any, rows: Batch, *, max_batch_size: int = 64, length: int = 24) -> Batch:
    rollout = HfRollout(lambda: for_generation(model), StopRule([1]), max_batch_size, CPU)
    steps = rollout.generate(rows, Sampling(1.0, 1.0, 0, length), lambda: False)
    return response_rows((response for step in steps for response in step.ended), rows)


@torch.no_grad()
def training_log_probs(model: Any, rollouts: Batch) -> np.ndarray[Any, Any]:
    limits = MicroBatchLimits(packed=True, max_tokens=10**6, image_settings=model.image_settings)
    log_probs: torch.Tensor = policy_forward(1.0)(model, collate(rollouts, None, limits, device=CPU))["log_probs"]
    return log_probs.numpy()


@pytest.mark.parametrize("max_batch_size", [64, 5])
def test_sampled_log_probs_are_those_of_the_training_forward(model_folder: Path, max_batch_size: int) -> None:
    """Rows of prompts with and without images are decoded together, and with few places rows join later."""
    model = load_model(str(model_folder))
    rollouts = sample(model, prompts_with_images(model_folder), max_batch_size=max_batch_size)
    has_images = np.repeat(rollouts["image_sizes"].lengths > 0, rollouts["responses"].lengths)
    is_image_token = rollouts["responses"].values == IMAGE_TOKEN
    assert is_image_token[has_images].any()
    assert is_image_token[~has_images].any()
    diff = np.abs(training_log_probs(model, rollouts) - rollouts["rollout_log_probs"].values)
    assert diff.max() <= 1e-5


def test_other_pixels_change_the_log_probs(model_folder: Path) -> None:
    model = load_model(str(model_folder))
    rollouts = sample(model, prompts_with_images(model_folder))
    first = rollouts.between(0, NUM_SAMPLES)
    other = rollouts.between(3 * NUM_SAMPLES, 4 * NUM_SAMPLES)  # its image has the same size
    exchanged = first.merge(other.select(["images", "image_sizes"]))
    diff = np.abs(training_log_probs(model, exchanged) - first["rollout_log_probs"].values)
    assert diff.max() > 1e-3


@torch.no_grad()
def test_a_tower_sees_all_of_an_image_while_rows_are_decoded(model_folder: Path) -> None:
    model = load_model(str(model_folder))
    settings = model.image_settings
    pixels = torch.from_numpy(np.random.default_rng(0).normal(size=(16, settings.patch_dim)).astype(np.float32))
    grid = torch.tensor([[1, 4, 4]])
    with for_generation(model):
        before = model.get_image_features(pixels, grid).pooler_output[0]
        with grouped_attention(model):
            within = model.get_image_features(pixels, grid).pooler_output[0]
            last = pixels.clone()
            last[-1] += 1.0
            changed = model.get_image_features(last, grid).pooler_output[0]
    assert torch.equal(before, within)
    assert (changed[0] - within[0]).abs().max() > 1e-4  # the first token of the image sees its last patch


def test_the_tower_computes_each_image_once_for_all_samples(model_folder: Path) -> None:
    model = load_model(str(model_folder))
    num_patches: list[int] = []
    tower = model.base_model.visual
    tower.register_forward_pre_hook(
        lambda _, arguments, options: num_patches.append(len((*arguments, *options.values())[0])), with_kwargs=True
    )
    rows = prompts_with_images(model_folder)
    sample(model, rows)
    images = [image for response in begin_responses(rows)[::NUM_SAMPLES] for image in response.images]
    distinct = {bytes(image.data): image.rows * image.columns for image in images}
    assert num_patches == [sum(distinct.values())]


@torch.no_grad()
def test_prompts_with_images_that_are_computed_in_parts_decode_as_all_at_once(model_folder: Path) -> None:
    model = load_model(str(model_folder))
    responses = begin_responses(prompts_with_images(model_folder, 2))
    prompts = [response.prompt for response in responses]
    images = [response.images for response in responses]
    with for_generation(model):
        whole = DecodedRows(model, prompts, CPU, images=images)
        parts = DecodedRows(model, prompts, CPU, images=images, max_mask=1)
        for step in range(3):
            torch.testing.assert_close(parts.logits, whole.logits, rtol=0, atol=1e-5)
            tokens = torch.arange(len(prompts)) + 3 + step
            whole.append(tokens)
            parts.append(tokens)


def images_of(rows: Batch) -> list[tuple[bytes, list[int]]]:
    return [
        (files.tobytes(), sizes.tolist())
        for files, sizes in zip(rows["images"].rows(), rows["image_sizes"].rows(), strict=True)
    ]


def test_responses_and_their_streamed_parts_have_the_images_of_their_prompts(folders: Path) -> None:
    rows = prompts_with_images(folders / "qwen2_5_vl")
    report = RecordedProgress()
    role = build_actor(folders / "qwen2_5_vl")
    columns = call(role, "Generate", generate_request(num_parts=4), rows, report).columns
    assert columns is not None
    of_prompts = images_of(rows)
    assert images_of(columns) == [images for images in of_prompts for _ in range(NUM_SAMPLES)]
    for part in report.parts.values():
        assert images_of(part) == [of_prompts[place // NUM_SAMPLES] for place in part["places"].values]


def test_text_alone_has_no_columns_of_images(folders: Path) -> None:
    rows = prompts_with_images(folders / "qwen2_5_vl").take(np.array([1, 5])).select(["prompts", "seeds"])
    columns = call(build_actor(folders / "qwen2_5_vl"), "Generate", generate_request(), rows).columns
    assert columns is not None
    assert set(columns.columns) == {"prompts", "seeds", "responses", "rollout_log_probs"}


def with_sizes(rows: Batch, sizes: Sequence[Sequence[int]]) -> Batch:
    return rows.merge(Batch.from_rows(image_sizes=sizes))


def test_images_that_a_prompt_has_no_tokens_for_are_refused(folders: Path) -> None:
    rows = prompts_with_images(folders / "qwen3_vl").take(np.array([1, 0]))
    sizes = [row.tolist() for row in rows["image_sizes"].rows()]
    role = build_actor(folders / "qwen3_vl")
    size, height, width = sizes[1]

    def refused(match: str, changed: Batch, **settings: Any) -> None:
        with pytest.raises(ValueError, match=match):
            call(role, "Generate", generate_request(**settings), changed)

    refused("column 'image_sizes', row 1: the prompt has", with_sizes(rows, [[], [size, height + 2, width]]))
    refused("column 'image_sizes', row 1: .* not multiples of 2", with_sizes(rows, [[], [size, height + 1, width]]))
    refused("column 'image_sizes', row 1: expected 3 values per image, got 2", with_sizes(rows, [[], [size, height]]))
    refused("column 'image_sizes', row 1: the images have", with_sizes(rows, [[], [size - 1, height, width]]))
    refused("columns images and image_sizes together, got only images", rows.select(["prompts", "seeds", "images"]))
    refused(
        f"column 'prompts', row 1: expected no image token, .* got {IMAGE_TOKEN}", rows.select(["prompts", "seeds"])
    )
    refused("expected no conversation with images", rows, conversation=Conversation())
    refused("expected no images with max_step_tokens", rows, max_step_tokens=2)
    begun = rows.select(["prompts", "images", "image_sizes"]).merge(
        Batch.from_rows(seeds=[[1], [2]], begun_responses=[[], [4]], begun_log_probs=[[], [-1.0]])
    )
    refused("expected no images with begun_responses and begun_log_probs", begun)


def test_images_for_a_model_that_reads_text_are_refused(folders: Path, tmp_path: Path) -> None:
    rows = prompts_with_images(folders / "qwen2_5_vl").take(np.array([1, 0]))
    role = build_actor(save_policy(tmp_path / "text", vocab_size=64))
    with pytest.raises(ValueError, match="the model has no vision tower, but column 'images' is not empty"):
        call(role, "Generate", generate_request(), rows)
    without = rows.take(np.array([0, 0]))
    assert call(role, "Generate", generate_request(), without).columns is not None
