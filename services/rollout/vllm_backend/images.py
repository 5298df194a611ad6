"""Gives vLLM images as pixels of our own, with their places in the prompt; vLLM's own processing of images never runs.

Images are resized and their tokens counted once, by `splitppo.images`, for the training forward and for vLLM. An image
token is known by its place: one that is sampled is an ordinary token.

This module imports vLLM, so it is imported after `import_vllm`. Written for vLLM 0.32.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl
from transformers.utils import is_torchvision_available
from vllm import ModelRegistry
from vllm.inputs.engine import mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from services.engine.batching.micro_batch_images import RowImages, image_name, image_patches
from splitppo.batch import Array
from splitppo.images.columns import RowImage
from splitppo.images.grid import most_image_tokens, num_image_tokens
from splitppo.images.positions import image_starts
from splitppo.images.settings import ImageSettings

_PROCESSOR = "transformers.models.qwen2_vl.image_processing_qwen2_vl"


def serve_images(settings: ImageSettings, max_tokens: int) -> None:
    """Lets vLLM's model of a family take images from `image_input`, each of `max_tokens` tokens at most.

    Called before the engine is built. vLLM's memory for images is that of the largest ones.
    """
    if not is_torchvision_available():
        # vLLM's models take one function of this module, `smart_resize`, which Pillow's has as well. The rest of it
        # needs torchvision.
        sys.modules.setdefault(_PROCESSOR, image_processing_pil_qwen2_vl)
    model_class = _model_class(settings.family)
    most = min(max_tokens, most_image_tokens(settings))
    model_class._processor_factory = None  # noqa: SLF001 - else the registry warns that one is replaced
    del model_class._processor_factory  # noqa: SLF001
    MULTIMODAL_REGISTRY.register_processor(
        _NoProcessor, info=lambda context: _Info(context, settings, most), dummy_inputs=_NoDummies
    )(model_class)
    # The class itself, as vLLM would import it in a process of its own.
    ModelRegistry.register_model(model_class.__name__, model_class)


def _model_class(family: str) -> Any:
    """Imports vLLM's model of a family, which may not be imported before `serve_images` has replaced its processor."""
    if family == "qwen2_5_vl":
        from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

        return Qwen2_5_VLForConditionalGeneration
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration


def image_input(prompt: Array, images: RowImages, settings: ImageSettings) -> Any:
    """Makes vLLM's input of a prompt with images: token ids, and for each image pixels, name and place."""
    grids = [(image.rows, image.columns) for image in images]
    starts = image_starts(prompt, grids, settings).tolist()
    lengths = [num_image_tokens(rows, columns, settings) for rows, columns in grids]
    places = [PlaceholderRange(offset, length) for offset, length in zip(starts, lengths, strict=True)]
    names = [image_name(image) for image in images]
    items = [_item(_Pixels(image, settings), (image.rows, image.columns)) for image in images]
    return mm_input(prompt.tolist(), MultiModalKwargsItems({"image": items}), {"image": names}, {"image": places})


class _Pixels(MultiModalFieldElem):  # type: ignore[misc]
    """The patches of an image, which are made when vLLM's tower reads them: all prompts wait with their files alone."""

    def __init__(self, image: RowImage, settings: ImageSettings) -> None:
        self.field = MultiModalFlatField(slices=())
        self._image = image
        self._settings = settings

    @property
    def data(self) -> Tensor:
        """The patches, [rows * columns, patch_dim] float32."""
        return torch.from_numpy(image_patches(self._image, self._settings))


def _item(pixels: MultiModalFieldElem, grid: tuple[int, int]) -> MultiModalKwargsItem:
    grid_thw = MultiModalFieldElem(torch.tensor([1, *grid]), MultiModalBatchedField(keep_on_cpu=True))
    return MultiModalKwargsItem({"pixel_values": pixels, "image_grid_thw": grid_thw})


class _Info(BaseProcessingInfo):  # type: ignore[misc]
    """Answers vLLM, before there are any images, how many a prompt may have and how large they are; no videos."""

    def __init__(self, context: Any, settings: ImageSettings, max_tokens: int) -> None:
        super().__init__(context)
        self.settings = settings
        self.max_tokens = max_tokens

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Returns the most images of a prompt: any number."""
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:  # noqa: ARG002
        """Returns the most tokens of an image."""
        return {"image": self.max_tokens}


class _NoProcessor(BaseMultiModalProcessor):  # type: ignore[misc]
    """Takes the place of vLLM's processor, and makes nothing but the images with which vLLM measures its memory."""

    requires_tokenizer = False

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], **_: Any) -> Any:
        """Makes black images of the most tokens, so many as vLLM wants."""
        num_images = mm_counts["image"]
        settings = self.info.settings
        length = self.info.max_tokens
        grid = (settings.merge_size, length * settings.merge_size)
        black = torch.zeros(length * settings.merged, settings.patch_dim)
        items = [_item(MultiModalFieldElem(black, MultiModalFlatField(slices=())), grid) for _ in range(num_images)]
        places = [PlaceholderRange(number * length, length) for number in range(num_images)]
        names = [f"black {number}" for number in range(num_images)]
        ids = [settings.image_token_id] * (length * num_images)
        return mm_input(ids, MultiModalKwargsItems({"image": items}), {"image": names}, {"image": places})

    def _get_mm_fields_config(self, *_: Any) -> Any:
        raise NotImplementedError("images come with their pixels")

    def _get_prompt_updates(self, *_: Any) -> Sequence[Any]:
        raise NotImplementedError("prompts come with their image tokens")


class _NoDummies(BaseDummyInputsBuilder):  # type: ignore[misc]
    """Makes nothing: `_NoProcessor` makes the images that vLLM measures with."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:  # noqa: ARG002
        """Returns no text."""
        return ""

    def get_dummy_mm_data(self, *_: Any) -> Mapping[str, Any]:
        """Returns no images."""
        return {}
