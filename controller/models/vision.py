"""Reads what the models of a run take of images, and checks that policy and critic take the same."""

from dataclasses import dataclass
from pathlib import Path

from controller.models.folder import model_folder
from splitppo.config import Config, ConfigError
from splitppo.config.section import TrainedRoleName
from splitppo.config_error import sentence_of
from splitppo.images.settings import ImageSettings, read_image_settings

# Actor and critic get one column of prompts, in which the images have the tokens and the grids of the actor.
_COUNTED_BY = (
    "patch_size",
    "merge_size",
    "min_pixels",
    "max_pixels",
    "image_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)


@dataclass(frozen=True)
class VisionInput:
    """The images that a model reads, if it reads any.

    Attributes:
        settings: how it divides and counts them; None if it reads text alone.
        reads_none_because: why it takes none, as the beginning of a sentence.
    """

    settings: ImageSettings | None = None
    reads_none_because: str = "actor.model has no vision tower"


NO_VISION = VisionInput()


def read_vision_input(config: Config, role: TrainedRoleName = "actor") -> VisionInput:
    """Reads what the model of a role takes of images from the files of its folder.

    Groups that are started elsewhere may have their models there: then the folder of `data.tokenizer` counts.

    Raises:
        ConfigError: there is no such folder, and no such model on the hub.
    """
    key = f"{role}.model"
    source = config.trained_model_of(role).model
    data = config.data
    assert data.tokenizer is not None, "load resolves it"
    if config.services.launch == "external" and not Path(source).expanduser().is_dir():
        source = data.tokenizer
    folder = model_folder(source, key)
    try:
        settings = read_image_settings(folder, min_pixels=data.min_pixels, max_pixels=data.max_pixels)
    except ValueError as error:  # a model of another family may be trained on text
        return VisionInput(None, f"{key} reads no images here ({sentence_of(error)})")
    return VisionInput(settings, f"{key} has no vision tower")


def check_counts_alike(actor: ImageSettings, critic: ImageSettings) -> None:
    """Checks that the critic reads images by the tokens and the patches that are counted for the actor.

    Raises:
        ConfigError: it does not; the sentence names the first difference.
    """
    for name in _COUNTED_BY:
        of_actor = getattr(actor, name)
        of_critic = getattr(critic, name)
        if of_actor != of_critic:
            raise ConfigError(f"critic and actor count images differently: {name} {of_critic} and {of_actor}")
