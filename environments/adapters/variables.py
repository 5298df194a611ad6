"""Environment variables in values of the configuration, by which secrets stay out of files."""

import os
from string import Template

from splitppo.config_error import ConfigError


def filled(text: str, key: str) -> str:
    """Puts values of environment variables in the place of $NAME; errors do not show them."""
    try:
        value = Template(text).substitute(os.environ).strip()
    except (KeyError, ValueError) as error:
        raise ConfigError(f"key '{key}': expected $NAME of environment variables that are set: {error}") from error
    if not value.isascii() or not value.isprintable():
        raise ConfigError(f"key '{key}': expected one line of ASCII after $NAME was replaced")
    return value
