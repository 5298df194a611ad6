"""Files that `services.security` names; those that hold a secret are their owner's alone."""

import logging
import stat
from pathlib import Path

from splitppo.config import ConfigError

log = logging.getLogger(__name__)


def write_secret(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, at no moment otherwise."""
    path.unlink(missing_ok=True)
    path.touch(0o600, exist_ok=False)
    path.write_text(text, encoding="utf-8")


def read_file(path: Path, key: str, *, is_secret: bool = False) -> bytes:
    """Reads the file of `services.security.<key>`; ConfigError if it cannot. Warns if others can read a secret."""
    try:
        content = path.read_bytes()
        mode = stat.S_IMODE(path.stat().st_mode)  # of what a link leads to
    except OSError as error:
        raise ConfigError(f"services.security.{key}: cannot read {path}: {error.strerror}") from error
    if is_secret and mode & 0o077:
        log.warning("services.security.%s: others can read %s (mode %04o): chmod 600", key, path, mode)
    return content
