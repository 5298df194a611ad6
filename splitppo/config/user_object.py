"""Classes and functions of the user's, that keys of the configuration name."""

from pathlib import Path
from typing import Any

from splitppo.config.load import ConfigError
from splitppo.user_file import load_from_file


def load_object(path: Path, name: str, *, path_key: str, name_key: str) -> Any:
    """As `load_from_file`; its sentence as a ConfigError."""
    try:
        return load_from_file(path, name, path_key=path_key, name_key=name_key)
    except ValueError as error:
        raise ConfigError(str(error)) from error
