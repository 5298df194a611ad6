"""Finds the folder of a model or a data set: a local one, or files that are fetched from the Hugging Face hub."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from splitppo.config_error import ConfigError, config_errors

GENERATION_CONFIG = "generation_config.json"


def local_folder(name: str, files: Sequence[str], kind: Literal["model", "dataset"] = "model") -> Path:
    """Returns the folder of a model on this machine; for a hub name, first fetches `files` (patterns) from the hub.

    `kind` says if it is the folder of a model or of a data set.

    Raises:
        ValueError: neither a folder nor a model on the hub has this name, or the hub cannot be reached.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{kind} folder {name} does not exist")
    import huggingface_hub  # slow to import, and a local folder does not need it

    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type=kind, allow_patterns=list(files)))
    except Exception as error:  # of the hub, of the network, of a name that cannot be one
        reason = str(error).strip().partition("\n")[0].removeprefix("Got: ") or type(error).__name__
        raise ValueError(
            f"there is no {kind} folder {name!r}, and the Hugging Face hub gave no {kind} of this name: {reason}"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; {} if the file does not exist, ConfigError if the file has no JSON object."""
    if not file.is_file():
        return {}
    with config_errors(ValueError, RecursionError, before=f"{file} is not valid JSON: "):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def eos_token_ids(file: Path) -> list[int]:
    """Reads the ids of the tokens that end a response from generation_config.json or config.json; [] if it has none.

    Raises:
        ConfigError: the file has no JSON object, or its `eos_token_id` is neither an id nor a list of them.
    """
    value = read_json(file).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ConfigError(f"{file}: expected eos_token_id to be a token id or a list of them, got {json.dumps(value)}")
    return ids
