"""Files that hold a secret: written for their owner alone, and looked at for who else can read them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

log = logging.getLogger(__name__)


def write_secret(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, at no moment otherwise."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def warn_if_others_can_read(path: Path, key: str) -> None:
    """Logs a warning for a secret that more than its owner can read; a link counts as what it leads to."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        log.warning("services.security.%s: others can read %s (mode %04o): chmod 600", key, path, mode)
