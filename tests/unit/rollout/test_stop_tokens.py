"""The tokens that end a response."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2Config

from services.rollout.stopping import load_tokenizer, stop_token_ids


def model(config_eos: Any, generation_eos: Any) -> Any:
    config = PreTrainedConfig(eos_token_id=config_eos)
    return SimpleNamespace(config=config, generation_config=SimpleNamespace(eos_token_id=generation_eos))


def save_tokenizer(folder: Path, eos: str | None) -> str:
    words = Tokenizer(WordLevel({"a": 0, "<end>": 5, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=eos).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "eos", "expected"),
    [(2, [2, 3], "<end>", [2, 3, 5]), (None, None, "<end>", [5]), ([7, 8], None, None, [7, 8]), (None, None, None, [])],
)
def test_all_places_that_name_a_stop_token_count(
    tmp_path: Path, config_eos: Any, generation_eos: Any, eos: str | None, expected: list[int]
) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, eos))
    assert stop_token_ids(model(config_eos, generation_eos), tokenizer) == expected


def test_the_language_model_of_one_that_reads_images_names_stop_tokens() -> None:
    config = Qwen2_5_VLConfig(text_config={"eos_token_id": 7})
    assert stop_token_ids(SimpleNamespace(config=config, generation_config=None), None) == [7]


def test_a_missing_tokenizer_is_no_error() -> None:
    assert stop_token_ids(model(2, None), None) == [2]


def test_a_model_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    """Hugging Face makes up a tokenizer for some of them, whose end-of-sequence token is token 0 of the model."""
    Qwen2Config(vocab_size=50).save_pretrained(tmp_path)

    with pytest.raises(ValueError, match="has no"):
        load_tokenizer(str(tmp_path))
