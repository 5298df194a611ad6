"""Environments that hold what a lock names, and nothing else."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

from tests.support.groups import PROJECT

UV = str(Path(sys.executable).with_name("uv"))


def make_environment(folder: Path, lock: str) -> Path:
    """Makes an environment of the packages that a lock names: links to those of this one, since copies take minutes.

    Returns:
        Its interpreter.
    """
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    [site_packages] = folder.glob("lib/python*/site-packages")
    named = re.findall(r"^([\w.-]+)==", (PROJECT / "requirements" / f"{lock}.txt").read_text(), re.MULTILINE)
    assert "grpcio" in named
    for distribution in map(importlib.metadata.distribution, named):
        installed = Path(str(distribution.locate_file("")))
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site_packages / top).exists():
                (site_packages / top).symlink_to(installed / top)
    return folder / "bin" / "python"
