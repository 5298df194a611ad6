"""Tokens are joined to the decoded text, whatever their bytes are."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from controller.tracking.record.token_text import decode_with_ends
from tests.support.recorded import byte_tokenizer

BACKEND = byte_tokenizer()
EOS = BACKEND.token_to_id("<eos>")


@given(st.lists(st.integers(0, EOS), max_size=80))
def test_ends_divide_the_text_of_any_bytes_into_its_tokens(ids: list[int]) -> None:
    text, ends = decode_with_ends(BACKEND, ids, {})
    assert len(ends) == len(ids)
    assert ends == sorted(ends)
    assert (ends[-1:] or [0]) == [len(text)]


@given(st.text(max_size=30))
def test_valid_text_comes_back_with_each_character_at_its_last_byte(text: str) -> None:
    ids = BACKEND.encode(text).ids
    decoded, ends = decode_with_ends(BACKEND, [*ids, EOS], {})
    assert decoded == text + "<eos>"
    lasts = [index for index, char in enumerate(text, 1) for _ in char.encode()]
    firsts = [index for index, char in enumerate(text) for _ in char.encode()]
    assert ends[-1] == len(decoded)
    assert all(first <= end <= last for first, end, last in zip(firsts, ends, lasts, strict=False))


def test_long_rubbish_ends_in_replacement_characters_before_what_follows() -> None:
    byte = BACKEND.encode("é").ids[0]
    text, ends = decode_with_ends(BACKEND, [byte] * 100 + BACKEND.encode("ok").ids, {})
    assert text.endswith("ok")
    assert set(text[:-2]) == {"\ufffd"}
    assert ends[-2:] == [len(text) - 1, len(text)]


def test_a_space_that_a_token_shows_only_behind_others_belongs_to_it() -> None:
    words = ["\u2581one", "\u2581two", "s"]
    backend = tokenizers.Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    backend.decoder = decoders.Metaspace()
    assert decode_with_ends(backend, [0, 2, 1, 0], {}) == ("ones two one", [3, 4, 8, 12])


def test_what_is_known_of_tokens_serves_all_texts() -> None:
    known: dict[int, str] = {}
    texts = [decode_with_ends(BACKEND, BACKEND.encode(text).ids, known) for text in ("ab", "b\u00e9", "ba")]
    assert texts == [("ab", [1, 2]), ("b\u00e9", [1, 1, 2]), ("ba", [1, 2])]
    assert {text for text in known.values() if text.isascii()} == {"a", "b"}
