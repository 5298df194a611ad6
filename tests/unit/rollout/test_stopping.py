"""The end of a response: stop tokens, and stop texts that tokens complete."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from services.rollout.stopping import StopRule, load_stop_rule
from tests.support.fake_services import make_config
from tests.support.seeds import shifted

NO_PROMPT = np.empty(0, np.int32)
PIECES = ("END", "x", "ab", "cd", "EN", "D", "</", "ans", "wer", ">", "wer>", " ", "Ġa")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level: PIECES, then every single byte, then a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = list(dict.fromkeys([*PIECES, *alphabet]))
    backend = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def ids(tokenizer: Any, *pieces: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(piece) for piece in pieces]


def length_of(rule: StopRule, tokens: list[int], prompt: Any = NO_PROMPT) -> int | None:
    """Tokens of the response up to and including the one that ends it; None: none does."""
    watch = rule.begin(np.asarray(prompt, np.int32))
    return next((index + 1 for index, token in enumerate(tokens) if watch.ends_with(token)), None)


def test_a_stop_token_ends_the_response() -> None:
    assert length_of(StopRule([7, 9]), [1, 2, 9, 7]) == 3
    assert length_of(StopRule([]), [1, 2, 9, 7]) is None


@pytest.mark.parametrize(
    ("pieces", "length"),
    [
        (("x", "END", "x"), 2),  # one token
        (("x", "EN", "x", "EN", "D", "x"), 5),  # split over tokens, after one that only began it
        (("E", "N", "D"), 3),
        (("ab", "</", "ans", "wer>", "x"), 4),  # ends with a token
        (("x", "<", "/", "ans", "wer", ">", "x"), 6),
        (("EN", "x", "D"), None),
        (("EN", "EN", "D"), 3),
    ],
)
def test_the_token_that_completes_a_text_ends_the_response(
    tokenizer: Any, pieces: tuple[str, ...], length: int | None
) -> None:
    rule = StopRule([], ["END", "</answer>"], tokenizer)

    assert length_of(rule, ids(tokenizer, *pieces)) == length


def test_a_text_may_begin_and_end_inside_tokens(tokenizer: Any) -> None:
    assert length_of(StopRule([], ["bc"], tokenizer), ids(tokenizer, "ab", "x", "ab", "cd", "x")) == 4


def test_a_text_of_one_character_is_found_inside_a_token(tokenizer: Any) -> None:
    assert length_of(StopRule([], ["w"], tokenizer), ids(tokenizer, "x", "wer>", "x")) == 2


def test_a_character_counts_with_the_last_token_of_its_bytes(tokenizer: Any) -> None:
    encoded = tokenizer("xé→x")["input_ids"]
    assert len(encoded) == 7

    assert length_of(StopRule([], ["é"], tokenizer), encoded) == 3
    assert length_of(StopRule([], ["é→"], tokenizer), encoded) == 6


def test_bytes_that_are_no_character_do_not_hide_a_text_behind_them(tokenizer: Any) -> None:
    lone_byte = tokenizer("é")["input_ids"][1]

    assert length_of(StopRule([], ["END"], tokenizer), [lone_byte, *ids(tokenizer, "x", "x", "END")]) == 4


def test_a_text_that_begins_in_the_prompt_does_not_count(tokenizer: Any) -> None:
    prompt = ids(tokenizer, "x", "EN")

    assert length_of(StopRule([], ["END"], tokenizer), ids(tokenizer, "D", "x"), prompt) is None
    assert length_of(StopRule([], ["END"], tokenizer), ids(tokenizer, "D", "END"), prompt) == 2


def test_special_tokens_have_no_text(tokenizer: Any) -> None:
    tokens = [*ids(tokenizer, "EN"), tokenizer.eos_token_id, *ids(tokenizer, "D")]

    assert length_of(StopRule([], ["eos"], tokenizer), tokens) is None
    assert length_of(StopRule([], ["END"], tokenizer), tokens) == 3


def test_stop_tokens_and_texts_go_together_and_responses_do_not_mix(tokenizer: Any) -> None:
    stop_token, *_ = ids(tokenizer, "x")
    rule = StopRule([stop_token], ["END"], tokenizer)
    first, second = rule.begin(NO_PROMPT), rule.begin(NO_PROMPT)

    assert not first.ends_with(*ids(tokenizer, "EN"))
    assert not second.ends_with(*ids(tokenizer, "D"))
    assert second.ends_with(stop_token)
    assert first.ends_with(*ids(tokenizer, "D"))


@pytest.mark.parametrize("text", ["END", "bc", "→"])
def test_the_length_is_the_least_number_of_tokens_whose_text_contains_the_stop_text(tokenizer: Any, text: str) -> None:
    rng = np.random.default_rng(shifted(0))
    pool = [*ids(tokenizer, "EN", "D", "END", "ab", "cd", "x"), *tokenizer("→")["input_ids"]]
    rule, num_ended = StopRule([], [text], tokenizer), 0
    for number in range(200):
        tokens = rng.choice(pool, 30).tolist()
        if number % 2:  # by chance alone, it is seldom there
            place = int(rng.integers(31))
            tokens[place:place] = tokenizer(text)["input_ids"]
        whole = (end for end in range(1, len(tokens) + 1) if text in tokenizer.decode(tokens[:end]))
        expected = next(whole, None)
        assert length_of(rule, tokens) == expected
        num_ended += expected is not None
    assert num_ended >= 100


@pytest.mark.parametrize("text", ["END", "bc", "→"])
def test_a_response_that_goes_on_ends_with_the_token_with_which_it_would_have_ended(tokenizer: Any, text: str) -> None:
    rng = np.random.default_rng(shifted(1))
    pool = [*ids(tokenizer, "EN", "D", "END", "ab", "cd", "x"), *tokenizer("→é")["input_ids"]]
    rule, num_ended = StopRule([], [text], tokenizer), 0
    for _ in range(100):
        prompt, tokens = rng.choice(pool, 3).astype(np.int32), rng.choice(pool, 20).tolist()
        place = int(rng.integers(21))
        tokens[place:place] = tokenizer(text)["input_ids"]
        length = length_of(rule, tokens, prompt)
        num_ended += length is not None
        for num_begun in range(length or len(tokens)):
            watch = rule.begin(prompt, begun=tokens[:num_begun])
            rest = (end for end in range(num_begun, len(tokens)) if watch.ends_with(tokens[end]))
            assert next(rest, None) == (None if length is None else length - 1)
    assert num_ended >= 50


def test_an_empty_text_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"rollout\.stop must hold no empty text"):
        StopRule([], ["a", ""], tokenizer)


def test_texts_without_a_tokenizer_that_decodes_are_refused(tmp_path: Path) -> None:
    model: Any = SimpleNamespace(config=PreTrainedConfig(eos_token_id=5), generation_config=None)

    with pytest.raises(ValueError, match=r"rollout\.stop needs a fast"):
        StopRule([], ["END"], object())
    with pytest.raises(ValueError, match=rf"rollout\.stop needs a tokenizer: {tmp_path} has no"):
        load_stop_rule(model, make_config(tmp_path, actor__model=str(tmp_path), rollout__stop=["END"]))


def test_the_rule_of_a_model_has_its_stop_tokens_and_the_texts(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    model: Any = SimpleNamespace(config=PreTrainedConfig(eos_token_id=5), generation_config=None)

    rule = load_stop_rule(model, make_config(tmp_path, data__tokenizer=str(tmp_path), rollout__stop=["ab"]))
    without_tokenizer = load_stop_rule(model, make_config(tmp_path, actor__model=str(tmp_path / "none")))

    assert length_of(rule, [1, 5]) == 2
    assert length_of(rule, [1, tokenizer.eos_token_id]) == 2
    assert length_of(rule, ids(tokenizer, "x", "ab")) == 2
    assert length_of(without_tokenizer, [1, 5]) == 2
