"""The exception for a configuration that cannot be used.

This module needs no package, so any process can import it.
"""


class ConfigError(ValueError):
    """Raised if the configuration cannot be used; the message names the key or file and says what was expected."""
