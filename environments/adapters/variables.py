"""Environment variables in values of the configuration, by which secrets stay out of files."""

import os
from string import Template

from splitppo.config_error import ConfigError, config_errors

_secrets: dict[str, str] = {}  # names of variables, by the values that were filled in


def filled(text: str, key: str) -> str:
    """Puts values of environment variables in the place of $NAME; errors do not show them."""
    expected = f"key '{key}': expected $NAME of environment variables that are set: "
    with config_errors(KeyError, ValueError, before=expected):
        value = Template(text).substitute(os.environ).strip()
    if not value.isascii() or not value.isprintable():
        raise ConfigError(f"key '{key}': expected one line of ASCII after $NAME was replaced")
    _secrets.update((os.environ[name].strip(), name) for name in Template(text).get_identifiers())
    return value


def without_secrets(text: str) -> str:
    """Puts $NAME in the place of values that were filled in, for errors that may repeat them."""
    for value in sorted(filter(None, _secrets), key=len, reverse=True):
        text = text.replace(value, f"${_secrets[value]}")
    return text
