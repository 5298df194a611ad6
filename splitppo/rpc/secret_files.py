"""Reads files for TLS and tokens, and writes files with secrets that only their owner can read."""

import logging
import stat
from pathlib import Path

from splitppo.config_error import ConfigError

log = logging.getLogger(__name__)


def write_secret(path: Path, text: str) -> None:
    """Writes a text file that nobody but its owner can read at any moment (mode 0600)."""
    path.unlink(missing_ok=True)
    path.touch(0o600, exist_ok=False)
    path.write_text(text, encoding="utf-8")


def read_file(path: Path, key: str, *, is_secret: bool = False) -> bytes:
    """Reads the file that a configuration key or an option names; logs a warning if other users can read a secret.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        content = path.read_bytes()
        mode = stat.S_IMODE(path.stat().st_mode)  # of the file that a link leads to
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
    if is_secret and mode & 0o077:
        log.warning("%s: others can read %s (mode %04o): chmod 600", key, path, mode)
    return content
