"""Finds the weight files in a Hugging Face model folder: one safetensors file, or those that an index names."""

import json
from pathlib import Path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EXPECTED = f"{SINGLE_FILE} or {INDEX_FILE}"


def weight_files(folder: Path) -> list[Path]:
    """Returns the paths of a model's safetensors files, sorted by name; an empty list if the folder has no weights.

    Raises:
        ValueError: the index cannot be used, or names a file that is not there, or not the single file beside it, which
            transformers then reads, while vLLM reads those of the index.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return [folder / SINGLE_FILE] if (folder / SINGLE_FILE).is_file() else []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / name for name in names]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is no JSON object with a weight_map of file names") from error
    for file in files:
        if not file.is_file():
            raise ValueError(f"{index} names {file.name}, which is not there")
    if (folder / SINGLE_FILE).is_file() and SINGLE_FILE not in names:
        raise ValueError(
            f"{folder} has {SINGLE_FILE} and, by {INDEX_FILE}, weights in other files: remove those that are out of"
            " date (the single file, or the index and its files)"
        )
    return files
