"""The tiny models of the recipes: folders that the controller and transformers read alike, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from controller.data.tokenizer import load_tokenizer
from recipes.made_once import make_once
from recipes.tiny_models import make_tiny_model


def rows(*questions: str) -> list[dict[str, Any]]:
    return [
        {"prompt": [{"role": "user", "content": text}], "extra_info": {"answer": "6 * 7 = 42"}} for text in questions
    ]


def test_a_policy_has_a_tokenizer_with_a_chat_template(tmp_path: Path) -> None:
    make_tiny_model("tiny_model", rows("How many boxes of nails?"), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert 0.9e6 < model.num_parameters() < 1.2e6
    assert tokenizer.eos_token_ids == tuple(model.generation_config.eos_token_id)
    messages = [{"role": "user", "content": "How many?"}]
    rendered = tokenizer.chat_template.render(messages)
    assert rendered == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    text = "1,200 nails — it's\n\n  naïve"
    expected = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).encode(text).ids
    transformers_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert transformers_tokenizer(text).input_ids == expected
    assert tokenizer.decode_batch([np.array(expected)]) == [text]
    templated = transformers_tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert templated["input_ids"] == tokenizer.encode_batch([messages], [rendered])[0].tolist()


def test_a_reward_model_has_one_label(tmp_path: Path) -> None:
    make_tiny_model("tiny_reward_model", rows("How?"), tmp_path / "model")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").num_labels == 1


def test_a_model_is_made_again_only_from_other_rows_and_then_in_the_same_way(
    tmp_path: Path, version_of: Callable[[Path], tuple[int, int]]
) -> None:
    folder = tmp_path / "model"
    assert "up to date" not in make_tiny_model("tiny_model", rows("How?"), folder)
    weights = version_of(folder / "model.safetensors")
    assert make_tiny_model("tiny_model", rows("How?"), folder).endswith("up to date")
    assert version_of(folder / "model.safetensors") == weights
    first = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert "up to date" not in make_tiny_model("tiny_model", rows("How? Why?"), folder)
    make_tiny_model("tiny_model", rows("How?"), folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == first


def test_what_could_not_be_made_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    make_once(tmp_path / "out", {"seed": 1}, lambda folder: folder.joinpath("a").touch())

    def fail(folder: Path) -> None:
        folder.joinpath("b").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_once(tmp_path / "out", {"seed": 2}, fail)
    assert (tmp_path / "out" / "a").exists()
    assert make_once(tmp_path / "out", {"seed": 2}, lambda folder: folder.joinpath("c").touch())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["c", "fingerprint.json"]
