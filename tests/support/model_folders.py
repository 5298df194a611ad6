"""Model folders and prompt files, as far as the controller reads them before a run."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

LETTERS = "abcdefghij"
HEADER = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
EXTERNAL = {
    "services__launch": "external",
    **{f"services__{role}__address": f"localhost:{port}" for port, role in enumerate(("actor", "critic"), 7001)},
}


def write_model(folder: Path, *, vocab_size: int = 20, nested: bool = False, **more: int) -> str:
    """A model folder as far as the controller reads it."""
    folder.mkdir(parents=True)
    backend = Backend(models.WordLevel({letter: index for index, letter in enumerate(LETTERS)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.save(str(folder / "tokenizer.json"))
    sizes = {"vocab_size": vocab_size, **more}
    (folder / "config.json").write_text(json.dumps({"text_config": sizes} if nested else sizes))
    write_weights(folder)
    return str(folder)


def write_weights(folder: Path) -> None:
    """Writes a file of weights with one number in it."""
    (folder / "model.safetensors").write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + bytes(4))


def write_rows(file: Path, *data_sources: str) -> str:
    rows = [{"prompt": "abc", "data_source": source, "reward_model": {"ground_truth": "c"}} for source in data_sources]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)
