"""Runs models that read images: their two parts, the attention of each, and the features of images in a call.

A vision tower turns patches of images into features, one for each token of an image. The language model takes them at
the places of these tokens in place of embeddings; after its first layers it may add more features there (deepstack).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from services.engine.batching.micro_batch_images import MicroBatchImages

VISION_TOWER = "model.visual."  # begins the names of its weights
_TOWER_ATTENTION = "sdpa"  # sees all patches of an image, or of a window


def vision_tower(model: Any) -> nn.Module | None:
    """Returns the vision tower of a model, with what maps its features to the language model; None for a text model."""
    return getattr(getattr(model, "base_model", None), "visual", None)


def learns(part: nn.Module | None) -> bool:
    """Returns True if a part of a model has weights that are not frozen."""
    return part is not None and any(weight.requires_grad for weight in part.parameters())


def use_attention(model: Any, name: str) -> None:
    """Gives the language model an attention by its name in transformers; a vision tower always gets its own."""
    if vision_tower(model) is None:
        model.set_attn_implementation(name)
    else:
        model.set_attn_implementation({"": name, "text_config": name, "vision_config": _TOWER_ATTENTION})


@contextmanager
def given_images(model: Any, images: MicroBatchImages | None, shape: torch.Size) -> Iterator[dict[str, Any]]:
    """Gives a `with` block more arguments for its one call of a model, or of its base model, with images.

    `shape` is that of the token ids of the call, [rows, positions]. Features are computed once for each distinct image.
    transformers would look for image tokens by their id, also among sampled tokens, and refuse the call then.

    If the tower learns and there are no images, it computes a smallest image that has no place: its gradient is then 0
    instead of none. All ranks reduce gradients together, so each must have one.
    """
    tower = vision_tower(model)
    if tower is not None and images is None and torch.is_grad_enabled() and learns(tower):
        images = MicroBatchImages.without_places(tower.config, next(tower.parameters()).device)
    if images is None:
        yield {}
        return
    base = model.base_model
    mask = torch.zeros(shape.numel(), dtype=torch.bool, device=images.places.device)
    mask[images.places] = True
    mask = mask.view(*shape, 1)
    base.get_placeholder_mask = lambda *_, **__: (mask, mask)
    try:
        yield {"mm_encoder_outputs": {"image": _features(base, images)}}
    finally:
        del base.get_placeholder_mask


def _features(base: Any, images: MicroBatchImages) -> Any:
    """Computes the features of images as transformers returns them, in the order of the places that take them."""
    output = base.get_image_features(images.pixels, images.grids, return_dict=True)

    def at_places(features: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (torch.cat(features).index_select(0, images.features),)

    output.pooler_output = at_places(output.pooler_output)
    if "deepstack_features" in output:
        output.deepstack_features = [at_places(features) for features in output.deepstack_features]
    return output
