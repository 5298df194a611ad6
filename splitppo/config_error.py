"""The exception for a configuration that cannot be used.

This module needs no package, so any process can import it.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """Raised if the configuration cannot be used; the message names the key or file and says what was expected."""


@contextmanager
def config_errors(*kinds: type[Exception], before: str = "", after: str = "") -> Iterator[None]:
    """Turns errors of these kinds, in a `with` block, into a ConfigError with a text `before` and `after` theirs."""
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{before}{error}{after}") from error
