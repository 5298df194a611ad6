"""Fills folders that take long to make, such as models, once, and again only if their inputs have changed."""

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from splitppo.file_lock import any_lock

Fingerprint = Mapping[str, str | int]
_FINGERPRINT_FILE = "fingerprint.json"


def make_once(folder: Path, wanted: Fingerprint, make: Callable[[Path], None]) -> bool:
    """Lets `make` fill a folder, unless the folder was made from the same inputs; returns True if it was made now.

    The folder appears whole or not at all. Several processes may call this function at the same time.

    Args:
        folder: replaced if it has another fingerprint; its lock stays beside it.
        wanted: everything that the content depends on.
        make: gets the folder to write to.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with any_lock([folder.with_name(f"{folder.name}.lock")]):
        if _stored_fingerprint(folder) == wanted:
            return False
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        make(unfinished)
        (unfinished / _FINGERPRINT_FILE).write_text(json.dumps(wanted, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    return True


def code_fingerprint(*files: Path) -> dict[str, str]:
    """Fingerprints the code that makes a model: SHA-256 of the files, versions of torch and transformers."""
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {"code_sha256": code.hexdigest(), **versions}


def _stored_fingerprint(folder: Path) -> object:
    try:
        return json.loads((folder / _FINGERPRINT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
