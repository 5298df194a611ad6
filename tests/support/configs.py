"""Loads the smallest configuration with overrides, or returns the sentence of its error."""

import re
from pathlib import Path

import pytest

from splitppo.config import Config, ConfigError, load_config
from splitppo.config.batch_plan import batch_plan

MINIMAL = """
run: {dir: runs/x, total_steps: 3}
data: {train_files: train.parquet, train_batch_size: 8}
actor: {model: models/tiny}
"""


def load(tmp_path: Path, *overrides: str, text: str = MINIMAL) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return load_config(file, overrides)


def mistake(tmp_path: Path, *overrides: str, text: str = MINIMAL) -> str:
    with pytest.raises(ConfigError) as caught:
        batch_plan(load(tmp_path, *overrides, text=text))
    sentence = str(caught.value)
    assert "\n" not in sentence
    for origin in (str(tmp_path / "config.yaml"), *(f"override {override!r}" for override in overrides)):
        sentence = re.sub(rf"^{re.escape(origin)}: (?=key |unknown key |[a-z_.0-9]+:? )", "", sentence)
    return sentence
