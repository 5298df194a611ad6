"""Makes hard links of files, or copies where a link is not possible."""

import os
import shutil
from pathlib import Path


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Makes `target` a hard link of `source`, or a copy where the file systems differ or have no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
