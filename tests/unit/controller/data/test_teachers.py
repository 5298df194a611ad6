"""The inputs of a run with teachers: every mistake is one sentence, before the run starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from controller.models.checks import check_models
from controller.preflight import load_inputs
from splitppo.config import ConfigError
from tests.support.model_folders import EXTERNAL, LETTERS, write_model, write_rows


def with_vocabulary(folder: Path, *tokens: str) -> str:
    """A model folder whose tokenizer has these tokens."""
    write_model(folder)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    Backend(models.WordLevel(vocabulary, unk_token=tokens[0])).save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ([*LETTERS[:4], "x", *LETTERS[5:]], "token '(e|x)' has (no id there, and id 4|id 4 there, and no id) here"),
        ([*LETTERS[:8], "j", "i"], "token '[ij]' has id [89] there, and id [89] here"),
        ([*LETTERS, "k"], "token 'k' has id 10 there, and no id here"),
        ([*LETTERS[:9]], "token 'j' has no id there, and id 9 here"),
    ],
)
def test_a_teacher_with_another_tokenizer_is_refused_with_the_first_token_that_differs(
    tmp_path: Path, make: Any, tokens: list[str], sentence: str
) -> None:
    same, other = with_vocabulary(tmp_path / "same", *LETTERS), with_vocabulary(tmp_path / "other", *tokens)
    assert load_inputs(make(teacher__model=same))
    by_source = {"teacher__model": same, "teacher__models": {"sort_letters": other}}
    for key, changes in {"model": {"teacher__model": other}, "models.sort_letters": by_source}.items():
        with pytest.raises(ConfigError) as caught:
            load_inputs(make(**changes))
        start = f"teacher.{key}: {other} has another tokenizer than the policy (data.tokenizer): "
        assert str(caught.value).startswith(start)
        assert re.fullmatch(sentence, str(caught.value).removeprefix(start))


def test_a_row_without_a_teacher_is_refused_with_its_data_source(tmp_path: Path, make: Any) -> None:
    teacher = write_model(tmp_path / "teacher")
    assert load_inputs(make(teacher__models={"sort_letters": teacher}))
    with pytest.raises(
        ConfigError,
        match=r"^teacher\.models: data_source 'sort_letters' has no teacher: add it, or set teacher\.model, which",
    ):
        load_inputs(make(teacher__models={"chat": teacher}))


def test_a_teacher_of_rows_that_are_not_there_is_refused(tmp_path: Path, make: Any) -> None:
    teacher = write_model(tmp_path / "teacher")
    sentence = r"^teacher\.models: no training prompt has data_source 'sort'; they have sort_letters$"
    with pytest.raises(ConfigError, match=sentence):
        load_inputs(make(teacher__model=teacher, teacher__models={"sort": teacher}))


def test_a_teacher_without_a_tokenizer_is_refused_with_its_key(tmp_path: Path, make: Any) -> None:
    teacher = write_model(tmp_path / "teacher")
    Path(teacher, "tokenizer.json").unlink()
    with pytest.raises(
        ConfigError, match=r"^teacher\.model: .*/teacher has no tokenizer\.json: expected the tokenizer of"
    ):
        load_inputs(make(teacher__model=teacher))


@pytest.mark.parametrize("signal", ["advantage", "top_k"])
def test_more_likely_tokens_than_there_are_are_refused(tmp_path: Path, make: Any, signal: str) -> None:
    changes = {"teacher__model": write_model(tmp_path / "teacher"), "teacher__signal": signal}
    assert load_inputs(make(**changes, teacher__top_k=10))
    if signal == "advantage":
        assert load_inputs(make(**changes, teacher__top_k=11))
        return
    with pytest.raises(ConfigError, match=r"^teacher\.top_k \(11\) must not exceed the 10 tokens$"):
        load_inputs(make(**changes, teacher__top_k=11))


@pytest.mark.parametrize("which", ["model", "models"])
def test_a_teacher_shorter_than_a_row_is_refused(tmp_path: Path, make: Any, which: str) -> None:
    short = write_model(tmp_path / "short", max_position_embeddings=515)
    changes = {f"teacher__{which}": short if which == "model" else {"sort_letters": short}}
    key = "teacher.model" if which == "model" else "teacher.models.sort_letters"
    assert check_models(make(**changes, data__max_response_length=3)) == 20
    with pytest.raises(ConfigError, match=rf"^{key} has max_position_embeddings 515, .*\(516 tokens\)"):
        check_models(make(**changes, data__max_response_length=4))
    longer = {"teacher__override_config": {"max_position_embeddings": 516}}
    assert check_models(make(**changes, **longer, data__max_response_length=4)) == 20


def test_a_teacher_that_is_not_there_is_refused_with_its_key(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"^model folder /no/such/model does not exist \(key teacher\.model\)$"):
        check_models(make(teacher__model="/no/such/model"))


def test_external_services_may_have_their_teachers_elsewhere(
    tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_inputs(make(**EXTERNAL, teacher__model="/there/teacher"))
    assert "/there/teacher is not on this machine, its tokenizer is not compared" in caplog.text


def test_a_teacher_alone_needs_no_reward_function_and_rows_without_one_are_not_validated(
    tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    teacher = write_model(tmp_path / "teacher")
    chat = write_rows(tmp_path / "chat.jsonl", *["hh"] * 4)
    val = write_rows(tmp_path / "val.jsonl", "openai/gsm8k", "hh", "openai/gsm8k")
    taught = {"teacher__model": teacher, "teacher__signal": "reward", "data__train_files": chat}
    with pytest.raises(ConfigError, match="no reward for data_source 'hh'"):
        load_inputs(make(**taught))
    config = make(**taught, teacher__only=True, data__val_files=val)
    inputs = load_inputs(config)
    assert inputs.scored_sources(config) == {"openai/gsm8k"}
    assert inputs.val_prompts is not None
    assert inputs.val_prompts.row_indices.tolist() == [0, 2]
    assert "only reward functions validate, and data_source hh has none" in caplog.text
    assert load_inputs(make(**taught, teacher__only=True)).val_prompts is None
