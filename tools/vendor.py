"""Writes the JavaScript of others into viewer/static/vendor, from npm's packages at the versions of LOCK.

python -m tools.vendor

A package is taken only if its sha512 is that of the lock. No script of a package runs. Beside the files lies VENDORED,
with the sha256 of each, to which a test holds them.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "viewer" / "static" / "vendor"
VENDORED = "VENDORED"
# By package and version: its sha512 as npm states it, and the files that are taken, by name in the package.
LOCK: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "preact@11.2.0": (
        "sha512-/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
        {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "hooks.js", "LICENSE": "preact.LICENSE"},
    ),
    "htm@3.1.1": (
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"dist/htm.mjs": "htm.js", "LICENSE": "htm.LICENSE"},
    ),
    "uplot@1.6.32": (
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {"dist/uPlot.iife.min.js": "uplot.js", "dist/uPlot.min.css": "uplot.css", "LICENSE": "uplot.LICENSE"},
    ),
    "diff@9.0.0": (
        "sha512-svtcdpS8CgJyqAjEQIXdb3OjhFVVYjzGAPO8WGCmRbrml64SPw/jJD4GoE98aR7r25A0XcgrK3F02yw9R/vhQw==",
        {"libesm/diff/array.js": "diff_array.js", "libesm/diff/base.js": "diff_base.js", "LICENSE": "diff.LICENSE"},
    ),
}


def main() -> int:
    """Fetches every package, then writes; returns the exit status, 1 for a package that is not the lock's."""
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for package, (integrity, names) in LOCK.items():
            command = ["npm", "pack", "--silent", "--ignore-scripts", package]
            name = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.split()[-1]
            packed = Path(folder, name)
            found = "sha512-" + base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode()
            if found != integrity:
                sys.stderr.write(f"error: {package}: expected {integrity}, got {found}; nothing was written\n")
                return 1
            with tarfile.open(packed) as archive:
                for source, target in names.items():
                    content = archive.extractfile(f"package/{source}")
                    assert content is not None, source
                    files[target] = as_module(target, content.read())
    FOLDER.mkdir(parents=True, exist_ok=True)
    for target, content_bytes in files.items():
        (FOLDER / target).write_bytes(content_bytes)
    lines = [f"{hashlib.sha256(files[target]).hexdigest()}  {target}\n" for target in sorted(files)]
    (FOLDER / VENDORED).write_text("".join(lines), encoding="utf-8")
    return 0


def as_module(target: str, content: bytes) -> bytes:
    """Makes a file one that a browser loads without an import map, which the policy of the pages would refuse."""
    if target == "uplot.js":
        return content + b"\nexport default uPlot;\n"
    for name, file in ((b'"preact"', b"preact.js"), (b" './base.js'", b"diff_base.js")):
        content = content.replace(b"from" + name, b'from"./' + file + b'"')
    return content.split(b"\n//# sourceMappingURL=")[0]


if __name__ == "__main__":
    sys.exit(main())
