"""The error for a configuration that cannot be used.

This module needs no package, so any process can import it.
"""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key or file and what was expected."""
