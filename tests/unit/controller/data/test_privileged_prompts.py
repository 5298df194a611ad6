"""The texts that the value model alone reads: their fields, tokens and limits."""

from typing import Any

import pytest

from controller.data.privileged_prompts import PrivilegedPrompts
from controller.data.prompt_files import PromptRow
from controller.data.tokenizer import Tokenizer, load_tokenizer
from tests.support import models


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    models.save_tokenizer(folder)
    return load_tokenizer(str(folder))


def row(ground_truth: Any = "5", **extra_info: Any) -> PromptRow:
    return PromptRow("row 1", "go", "a", ground_truth, extra_info)


def test_a_text_has_fields_of_the_row_and_of_its_environment(tokenizer: Tokenizer) -> None:
    texts = PrivilegedPrompts("{ground_truth} {level} {hidden}", 64, tokenizer)
    assert texts.text(row(level=3), {"hidden": "a"}) == "5 3 a"
    tokens = texts.tokens(row(level=3), {"hidden": "a"})
    assert tokenizer.decode(tokens.tolist()) == "5 3 a"
    assert texts.tokens(row(level=3), {"hidden": "a"}) is tokens  # of the same text they are not made again


def test_a_text_gives_no_special_token(tokenizer: Tokenizer) -> None:
    special = {number for number, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}
    special -= {*tokenizer.backend.encode("\ufdd2").ids}  # the token of unknown characters, which any text may give
    spelled = "".join(tokenizer.backend.id_to_token(number) for number in special)
    assert special
    assert special <= {*tokenizer.backend.encode(spelled).ids}
    texts = PrivilegedPrompts(f"{spelled}{{ground_truth}}", 64, tokenizer)
    assert not special & {*texts.tokens(row(ground_truth=spelled), {}).tolist()}


@pytest.mark.parametrize(
    ("of_row", "of_environment", "sentence"),
    [
        (row(), {}, "there is no field 'x': the row has data_source, ground_truth"),
        (row(x=None), {"y": "1"}, "there is no field 'x': .*, its environment names y"),
        (row(x=float("nan")), {}, "there is no field 'x'"),
        (row(x=["secret"]), {}, "the field 'x': expected a text or a number, got an object of type list"),
        (row(x=True), {}, "the field 'x': expected a text or a number"),
        (row(x="secret"), {"x": "secret"}, r"the field 'x' is in the row and in privileged\(\)"),
        (row(x="5" * 9), {}, r"it has 9 tokens, more than critic.max_privileged_length \(8\)"),
        (row(x="5" * 5_000_000), {}, "it has 5,000,000 characters, more than"),
    ],
)
def test_a_text_that_cannot_be_made_is_one_sentence_without_values(
    tokenizer: Tokenizer, of_row: PromptRow, of_environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence) as refusal:
        PrivilegedPrompts("{x}", 8, tokenizer).tokens(of_row, of_environment)
    assert "secret" not in str(refusal.value)


def test_the_rows_of_a_column_are_those_of_the_responses(tokenizer: Tokenizer) -> None:
    texts = PrivilegedPrompts("{ground_truth}", 8, tokenizer)
    column = texts.column([row("5"), row("5"), row("67")], [{}, None, {}])["privileged_tokens"]
    assert column.lengths.tolist() == [1, 0, 2]  # nothing is learned from a lost conversation
    assert tokenizer.decode(column.values.tolist()).replace(" ", "") == "567"
