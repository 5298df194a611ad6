"""Finds the folder of a model or a data set: a local one, or files that are fetched from the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal


def local_folder(name: str, files: Sequence[str], kind: Literal["model", "dataset"] = "model") -> Path:
    """Returns the folder of a model on this machine; for a hub name, first fetches `files` (patterns) from the hub.

    `kind` says if it is the folder of a model or of a data set.

    Raises:
        ValueError: neither a folder nor a model on the hub has this name, or the hub cannot be reached.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{kind} folder {name} does not exist")
    import huggingface_hub  # slow to import, and a local folder does not need it

    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type=kind, allow_patterns=list(files)))
    except Exception as error:  # of the hub, of the network, of a name that cannot be one
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"{name!r} is neither a folder nor a {kind} that the hub gives us: {reason}") from error
