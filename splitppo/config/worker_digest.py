"""Computes a digest of configuration keys, by which a controller and a worker check that they have the same settings.

The digest covers the keys that shape what the worker's models compute: model, training and sampling.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from splitppo.config.keys import KEYS
from splitppo.config.schema import Config
from splitppo.config.section import RoleName
from splitppo.images.settings import read_image_settings


def worker_digest(config: Config, role: RoleName) -> str:
    """Computes the sha256 (hex) of the configuration keys that shape the models of a role, see `worker_sections`.

    The length of a run, addresses and the schedule do not change the digest.
    """
    return hashlib.sha256(json.dumps(worker_sections(config, role), sort_keys=True).encode()).hexdigest()


def worker_sections(config: Config, role: RoleName) -> dict[str, object]:
    """Returns the settings that decide what the models of a role compute and learn, as JSON values by key.

    A group that only hosts the reference has the actor's model, one that samples has its own view of it; the reward
    group has nothing of its own but its reward model.
    """
    sections: dict[str, object] = {}
    if role != "reward":
        sections = {
            "seed": config.run.seed,
            "actor" if role == "rollout" else role: config.model_of(role).model_dump(mode="json"),
            "rollout.n": config.rollout.n,
            "data.max_response_length": config.data.max_response_length,
        } | _image_sections(config, config.model_of(role).model)
    if role in ("actor", "rollout"):
        sections["rollout"] = _shaping(config, "rollout")
        sections["data.tokenizer"] = config.data.tokenizer
        sections["rollout.multi_turn.max_context_length"] = config.rollout.multi_turn.max_context_length
    if role == "actor":
        sections["reference"] = config.reference_host == role
    elif config.reference_host == role:
        sections["actor"] = config.actor.model_dump(mode="json")
        sections |= _image_sections(config, config.actor.model)
        sections["rollout.temperature"] = config.rollout.temperature
    if config.reward_model_host == role:
        sections["reward_model"] = _shaping(config, "reward_model")
    if config.teacher_host == role or (role == "actor" and config.teacher.is_in_loss):
        sections["teacher"] = _shaping(config, "teacher")
        sections["rollout.temperature"] = config.rollout.temperature
    return sections


def _image_sections(config: Config, model: str) -> dict[str, object]:
    """Returns how a model in a local folder divides and counts images; nothing if it reads text alone.

    A controller whose groups have their models on other machines has the same files in the folder of `data.tokenizer`.
    Of a model of the hub, the name says it, with the limits of pixels.
    """
    data = config.data
    sections: dict[str, object] = {"data.min_pixels": data.min_pixels, "data.max_pixels": data.max_pixels}
    folders = (Path(source).expanduser() for source in (model, data.tokenizer) if source)
    folder = next((folder for folder in folders if folder.is_dir()), None)
    settings = None
    if folder is not None:
        with suppress(ValueError):  # a model whose images are not read here may be trained on text
            settings = read_image_settings(folder, min_pixels=data.min_pixels, max_pixels=data.max_pixels)
    return sections if settings is None else sections | {"images": asdict(settings)}


def _shaping(config: Config, section: str) -> dict[str, object]:
    """Returns the keys and values of one section without the keys that only the controller reads."""
    tree: dict[str, object] = getattr(config, section).model_dump(mode="json")
    return {name: value for name, value in tree.items() if KEYS[f"{section}.{name}"].shapes_worker}
