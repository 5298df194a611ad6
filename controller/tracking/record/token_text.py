"""Decodes token ids into a text, with the place in the text where each token ends."""

from collections.abc import Sequence
from itertools import accumulate

import tokenizers
from tokenizers.decoders import DecodeStream

# Tokens after which text that is no UTF-8 yet is taken as it is, so that the time stays linear.
_MAX_WAITING = 16
_NO_TEXT = "\ufffd"  # stands for bytes that are none


def decode_with_ends(backend: tokenizers.Tokenizer, ids: Sequence[int], known: dict[int, str]) -> tuple[str, list[int]]:
    """Decodes token ids, special tokens included; returns the text and for each token the characters up to its end.

    A character of several tokens belongs to the last of them. `known` has the texts of tokens by themselves, to which
    those of other tokens are added: of tokens that are whole characters, a text is often these, one after the other.
    """
    for token in {*ids}.difference(known):
        known[token] = backend.decode([token], skip_special_tokens=False)
    pieces = [known[token] for token in ids]
    text = backend.decode(ids, skip_special_tokens=False)
    if "".join(pieces) == text and _NO_TEXT not in text:
        return text, [*accumulate(map(len, pieces))]
    return _decode_in_turn(backend, ids)


def _decode_in_turn(backend: tokenizers.Tokenizer, ids: Sequence[int]) -> tuple[str, list[int]]:
    """Decodes token after token; a character is complete with its last one."""
    stream = DecodeStream(skip_special_tokens=False)
    text = ""
    ends = list[int]()
    waiting = list[int]()
    for token in ids:
        piece = stream.step(backend, token)
        waiting.append(token)
        if piece is None and len(waiting) == _MAX_WAITING:
            piece = backend.decode(waiting, skip_special_tokens=False)
            stream = DecodeStream(skip_special_tokens=False)
        if piece is not None:
            text = text + piece
            waiting = []
        ends.append(len(text))
    if waiting:
        text += backend.decode(waiting, skip_special_tokens=False)
        ends[-1] = len(text)
    return text, ends
