"""Finds the folder of a model: a local one, or files that are fetched from the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path


def local_folder(name: str, files: Sequence[str]) -> Path:
    """Returns the folder of a model on this machine; for a hub name, first fetches `files` (patterns) from the hub.

    Raises:
        ValueError: neither a folder nor a model on the hub has this name, or the hub cannot be reached.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"model folder {name} does not exist")
    import huggingface_hub  # slow to import, and a local folder does not need it

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:  # of the hub, of the network, of a name that cannot be one
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"{name!r} is neither a folder nor a model that the hub gives us: {reason}") from error
