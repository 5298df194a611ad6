"""Reads the small files of a model (tokenizer, config.json), from a local folder or from the Hugging Face hub."""

from pathlib import Path
from typing import Any

from splitppo.config import ConfigError
from splitppo.config.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from splitppo.config_error import config_errors
from splitppo.model_folder import GENERATION_CONFIG, local_folder, read_json

_HUB_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    GENERATION_CONFIG,
    "config.json",
    "chat_template.jinja",
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
        raise ConfigError(f"{key}: {file.parent} has no config.json")
    description = read_json(file)
    return {**description.get("text_config", {}), **description}
