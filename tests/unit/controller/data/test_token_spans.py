"""The characters of each token, as the decoders of published tokenizers give them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from controller.data.token_spans import TokenSpans
from controller.data.tokenizer import Tokenizer

EOS = "<|im_end|>"
WORDS = ["sort the  letters of words,", "Grüße und 数学 😀 zählen", "def f(x):\n        return x\n\n"]


def byte_level() -> Tokenizer:
    """Returns a tokenizer like that of GPT-2, Qwen and Llama 3, with few merges: long characters are in pieces."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=[EOS], min_frequency=1, show_progress=False
    )
    backend.train_from_iterator(WORDS * 2, trainer)
    return Tokenizer(backend)


def sentencepiece() -> Tokenizer:
    """Returns a tokenizer like that of Llama 2: spaces are part of words, unknown characters are bytes."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁sort", "s", "ort", "ab", "▁a"]
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()


def read(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, list[str]]:
    """The text of the tokens, and what each of them holds of it."""
    array = np.array(ids, np.int32)
    [text] = tokenizer.decode_batch([array])
    spans = list(TokenSpans(tokenizer, array, text))
    assert len(spans) == len(ids)
    return text, [text[start:end] for start, end in spans]


def byte_tokens(data: bytes) -> list[int]:
    """One token per byte, of the byte-level tokenizer; by GPT-2's table, in which these 188 bytes are themselves."""
    themselves = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = {byte: chr(256 + index) for index, byte in enumerate(sorted({*range(256)} - {*themselves}))}
    tokens = [BYTE_LEVEL.backend.token_to_id(others.get(byte, chr(byte))) for byte in data]
    assert None not in tokens
    return tokens


def test_tokens_of_plain_text_hold_their_own_characters_and_merged_spaces() -> None:
    ids = BYTE_LEVEL.backend.encode("def f(x):\n        return x").ids
    text, texts = read(BYTE_LEVEL, ids)
    assert text == "def f(x):\n        return x"
    assert texts == [BYTE_LEVEL.decode([token]) for token in ids]
    assert any(len(token) > 1 and token.isspace() for token in texts)


def test_a_character_of_several_tokens_belongs_to_the_one_that_completes_it() -> None:
    text, texts = read(BYTE_LEVEL, byte_tokens("a€😀b".encode()))
    assert (text, texts) == ("a€😀b", ["a", "", "", "€", "", "", "", "😀", "b"])


def test_special_tokens_hold_nothing_wherever_they_stand() -> None:
    eos = BYTE_LEVEL.backend.token_to_id(EOS)
    text, texts = read(BYTE_LEVEL, [eos, *byte_tokens("é".encode()), eos, *byte_tokens(b"!"), eos])
    assert (text, texts) == ("é!", ["", "", "é", "", "!", ""])


def test_a_character_that_is_never_completed_belongs_to_its_tokens() -> None:
    eos = BYTE_LEVEL.backend.token_to_id(EOS)
    text, texts = read(BYTE_LEVEL, [*byte_tokens("a😀".encode()[:3]), eos])
    assert (text, texts) == ("a�", ["a", "�", "", ""])


def test_spaces_of_sentencepiece_are_where_the_text_has_them() -> None:
    pieces = ["▁sort", "▁▁", "ab", "<0xE6>", "<0x95>", "<0xB0>", "▁", "s", "▁a", "</s>"]
    text, texts = read(SENTENCEPIECE, [SENTENCEPIECE.backend.token_to_id(piece) for piece in pieces])
    assert text == "sort  ab数 s a"
    assert texts == ["sort", "  ", "ab", "", "", "数", " ", "s", " a", ""]


def test_a_response_without_tokens_has_no_spans() -> None:
    assert read(BYTE_LEVEL, []) == ("", [])


@given(st.text(max_size=20))
def test_bytes_one_by_one_complete_their_characters(text: str) -> None:
    expected = [piece for character in text for piece in [*[""] * (len(character.encode()) - 1), character]]
    assert read(BYTE_LEVEL, byte_tokens(text.encode())) == (text, expected)


@given(st.lists(st.integers(0, 299), max_size=30), st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]))
def test_whatever_was_sampled_the_spans_make_up_the_text(ids: list[int], tokenizer: Tokenizer) -> None:
    ids = [token for token in ids if token < tokenizer.vocab_size]
    text, texts = read(tokenizer, ids)
    assert "".join(texts) == text
