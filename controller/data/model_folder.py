"""Reads the small files of a model, from a local folder or from the Hugging Face hub."""

import json
from pathlib import Path
from typing import Any

from splitppo.config import ConfigError

_HUB_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
]


def model_folder(source: str, key: str) -> Path:
    """Returns the folder of a model; for a name on the hub it downloads the small files.

    `source` is the folder or the name, `key` is the key that has it, for errors.

    Raises:
        ConfigError: there is no such folder, and no such model on the hub.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ConfigError(f"model folder {source} does not exist (key {key})")
    import huggingface_hub  # slow to import, and a local folder does not need it

    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:  # HTTP errors of the hub are OSErrors
        reason = str(error).strip().split("\n")[0]
        where = "neither a local folder nor a model that the Hugging Face hub gives us"
        raise ConfigError(f"{source!r} is {where} (key {key}): {reason}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; empty if the file does not exist. ConfigError if it has no JSON object."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def read_description(source: str, key: str) -> dict[str, Any]:
    """Returns a model's config.json, with the entries of its text_config. ConfigError if it cannot be read."""
    file = model_folder(source, key) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{key}: {file.parent} has no config.json")
    description = read_json(file)
    return {**description.get("text_config", {}), **description}
