"""Reads the small files of a model (tokenizer, config.json), from a local folder or from the Hugging Face hub."""

from pathlib import Path
from typing import Any

from splitppo.config import ConfigError
from splitppo.config.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from splitppo.config_error import config_errors
from splitppo.manifest import MANIFEST
from splitppo.model_folder import GENERATION_CONFIG, local_folder, read_json

_HUB_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    GENERATION_CONFIG,
    "config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
]


def model_folder(source: str, key: str) -> Path:
    """Returns the local folder of a model or adapter; for a name on the hub, downloads the small files first.

    `source` is the folder or the name, `key` is the configuration key that has it, for errors.

    Raises:
        ConfigError: there is no such folder, and no such model on the hub.
    """
    with config_errors(ValueError, after=f" (key {key})"):
        return local_folder(source, _HUB_FILES)


def read_description(source: str, key: str) -> dict[str, Any]:
    """Reads a model's config.json and adds the entries of its text_config; ConfigError if the file cannot be read."""
    file = model_folder(source, key) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{key}: {file.parent} has no config.json{_if_checkpoint(file.parent)}")
    description = read_json(file)
    return {**description.get("text_config", {}), **description}


def _if_checkpoint(folder: Path) -> str:
    """Returns how to use a folder that is, or holds, a role's checkpoint of a run as a model; empty if it is none."""
    for role_folder in (folder, folder / "actor", *sorted(folder.glob("checkpoints/global_step_*/actor"))[-1:]):
        if (role_folder / MANIFEST).is_file():
            return (
                f": it is a checkpoint of a run; python -m services.engine.export --checkpoint {role_folder} --output"
                " DIR makes a model of it"
            )
    return ""
