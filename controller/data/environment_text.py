"""Converts text of tools and environments into token ids: no text ends a turn or begins another role's, or is too long.

A text may spell a special token, such as <|im_end|>. It is encoded as the characters that it consists of, so that the
model sees the same text and no special token. This holds for all special tokens, and for further added tokens that the
chat template itself writes, such as <tool_response>. All other texts get the tokens of the chat template's rendering.

What counts is what the tokenizer sees, behind a template that rewrites texts (`lower`, `replace`, `striptags`) and its
own normalizer (NFKC makes "<" of a fullwidth one). So the tokens are compared with those of a harmless text in its
place: if there are special tokens that these do not have, each character of the text is encoded by itself.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import tokenizers
from numpy.typing import NDArray

from controller.data.tokenizer import Tokenizer

# Two of Unicode's noncharacters, which no text has after `clean`.
BREAK = "\ufdd0"  # what stands on both sides of it is encoded separately
SIGN = "\ufdd1"  # the end of what a stand-in assistant says
_UNKNOWN = "\ufdd2"  # a noncharacter that no vocabulary has
_CLEANED = {ord(BREAK): "\ufffd", ord(SIGN): "\ufffd"}
_CHARACTERS_A_TOKEN = 16  # texts with more are shortened before they are encoded; only runs of blanks reach it

Tokens: TypeAlias = NDArray[np.int32]
Write: TypeAlias = Callable[[str], str]  # makes of a clean text the one that a chat template gets


def clean(text: str) -> str:
    """Replaces what no tokenizer takes, or what means something here: lone surrogates and two noncharacters."""
    return text.encode("utf-8", "replace").decode("utf-8").translate(_CLEANED)


class EnvironmentText:
    """Encodes and shortens texts of tools and environments for one tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Collects the tokens that no text may spell: special ones, and added ones that the chat template writes.

        The token of characters that the vocabulary lacks is none of them: any text may give it.
        """
        self._backend = tokenizer.backend
        source = tokenizer.chat_template.source
        protected = {
            number: token.content
            for number, token in self._backend.get_added_tokens_decoder().items()
            if token.special or (token.content.strip() and token.content in source)
        }
        unknown = self._backend.encode(_UNKNOWN, add_special_tokens=False).ids  # no text need spell it to get it
        self._protected = np.array([*protected.keys() - unknown], np.int32)
        self._tokens = _any_of(protected.values())
        added = self._backend.get_added_tokens_decoder()
        self._of_assistant = frozenset(protected[number] for number in protected if not added[number].special)

    def disarm(self, text: str) -> str:
        """Puts BREAK between the characters of each special token that a clean text spells."""
        return self._tokens.sub(lambda match: BREAK.join(match[0]), text)

    def disarm_assistant(self, text: str) -> str:
        """Writes what an assistant says as `disarm` does, but leaves added tokens such as <think> as they are."""
        return self._tokens.sub(
            lambda match: match[0] if match[0] in self._of_assistant else BREAK.join(match[0]), text
        )

    def plain_assistant(self, text: str) -> str:
        """Returns a text that spells no tokens but those that an assistant may write, in the place of what it says."""
        return "x" + "".join(token for token in self._tokens.findall(text) if token in self._of_assistant)

    def spelled(self, text: str) -> str | None:
        """Returns the first special token that a text has as the tokenizer sees it; None if it has none."""
        ids = self._special(self.encode(clean(text)))
        return self._backend.id_to_token(ids[0]) if ids else None

    def harmless(self, encode: Callable[[Write], Tokens], plain: Tokens) -> tuple[Write, Tokens]:
        """Finds the first way to write texts by which they give no special token; returns it and the tokens.

        The ways: disarmed, each character by itself, nothing. `encode` converts texts, written so, into tokens; `plain`
        has the tokens of `plain_text` in their place.
        """
        expected = self._special(plain)
        for write in (self.disarm, BREAK.join):
            ids = encode(write)
            if _is_subsequence(self._special(ids), expected):
                return write, ids
        return _nothing, encode(_nothing)

    def harmless_context(
        self, render: Callable[[Write, Write], str], *, add_special_tokens: bool
    ) -> tuple[str, Tokens]:
        """Returns the text and the tokens of a whole conversation, whose messages give no special token.

        `render` makes its text; it gets two ways to write the texts of messages, the second for those of an assistant.
        The ways are those of `harmless`.

        Raises:
            ValueError: there is a special token also without any text.
        """
        plain = self.encode(render(plain_text, self.plain_assistant), add_special_tokens=add_special_tokens)
        expected = self._special(plain)
        ways = ((self.disarm, self.disarm_assistant), (BREAK.join, BREAK.join), (_nothing, _nothing))
        for write, write_assistant in ways:
            text = render(write, write_assistant)
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            if _is_subsequence(self._special(ids), expected):
                return text.replace(BREAK, ""), ids
        raise ValueError("the messages give a special token of the model, also without their texts")

    def _special(self, ids: Tokens) -> list[int]:
        return [int(number) for number in ids[np.isin(ids, self._protected)]]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Tokens:
        """Converts a rendered text into token ids; no token spans a BREAK, which gets no token itself."""
        if BREAK not in text:
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            pieces = [self._backend.encode(piece, add_special_tokens=False) for piece in text.split(BREAK)]
            merged = tokenizers.Encoding.merge(pieces, growing_offsets=True)
            encoding = self._backend.post_process(merged, add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, np.int32)

    def fit(
        self,
        texts: Sequence[str],
        encode: Callable[[Sequence[str], Write], Tokens],
        limit: int,
        plain: Tokens | None = None,
    ) -> tuple[Sequence[str], Tokens]:
        """Cuts texts in their middle, if need be, so that `encode` of them has at most `limit` tokens.

        All texts are cut to the same number of tokens, to nothing if `limit` is too small. So the result is longer only
        if it is too long without any text.

        Args:
            texts: clean texts.
            encode: converts texts into the tokens that count, with a way to write them, see `harmless`.
            limit: a number of tokens.
            plain: `encode` of the texts as `plain_text`, if it is known.

        Returns:
            (texts, tokens): the texts as they are then, and `encode` of them.
        """
        kept = texts

        def fitted(write: Write) -> Tokens:
            nonlocal kept
            begun = texts if write == self.disarm else [_cut_in_middle(text, limit) for text in texts]
            kept, ids = self._cut(begun, lambda cut: encode(cut, write), limit)
            return ids

        write, ids = self.harmless(fitted, encode(texts, plain_text) if plain is None else plain)
        return [""] * len(texts) if write is _nothing else kept, ids

    def _cut(
        self, texts: Sequence[str], encode: Callable[[Sequence[str]], Tokens], limit: int
    ) -> tuple[Sequence[str], Tokens]:
        """Returns the texts, as long as the limit allows, and `encode` of them: at most `limit` tokens if possible.

        Texts that fit stay whole. Else all are shortened to the same number of tokens, at first what is left of the
        limit beside the tokens without any text. As long as the result is too long, that number falls by what is too
        much, shared among the texts, but by half at most. At 0 the texts are empty.
        """
        is_short = all(len(text) <= _CHARACTERS_A_TOKEN * limit for text in texts)
        if is_short and len(ids := encode(texts)) <= limit:
            return texts, ids
        most = max(limit - len(encode([""] * len(texts))), 0)
        while True:
            cut = [self._shortened(text, most) for text in texts]
            ids = encode(cut)
            excess = len(ids) - limit
            if excess <= 0 or not most:
                return cut, ids
            most = max(most + -excess // len(texts), most // 2)

    def _shortened(self, text: str, max_tokens: int) -> str:
        """Cuts the middle out of a text so that it has about `max_tokens` tokens, and writes there what is missing.

        Only the first and the last `_CHARACTERS_A_TOKEN * max_tokens` characters are encoded, and so may remain. If
        there is no room for two tokens beside the mark, the beginning of the text remains alone, without a mark.
        """
        max_chars = _CHARACTERS_A_TOKEN * max_tokens
        head_offsets = self._offsets(text[:max_chars])
        tail_start = max(len(text) - max_chars, 0)  # the first of the last `max_chars` characters
        if tail_start == 0 and len(head_offsets) <= max_tokens:
            return text
        longest_mark = _mark(len(text))
        num_kept = max_tokens - len(self.encode(longest_mark))
        if num_kept < 2:
            return text[: _end_of_first(max_tokens, head_offsets, max_chars)]
        num_tail = num_kept // 2
        num_head = num_kept - num_tail
        tail_offsets = self._offsets(text[tail_start:]) if tail_start > 0 else head_offsets
        start = _end_of_first(num_head, head_offsets, max_chars)
        end = max(start, tail_start + _start_of_last(num_tail, tail_offsets))
        return f"{text[:start]}{_mark(end - start)}{text[end:]}"

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        """Returns the first character of each token of a text, and the one after its last."""
        return self._backend.encode(text, add_special_tokens=False).offsets


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that finds each of these tokens, the longest first."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _end_of_first(num_tokens: int, offsets: Sequence[tuple[int, int]], num_characters: int) -> int:
    """Returns where the first `num_tokens` tokens of a text end: `num_characters`, its length, if it has no more."""
    return offsets[num_tokens][0] if len(offsets) > num_tokens else num_characters


def _start_of_last(num_tokens: int, offsets: Sequence[tuple[int, int]]) -> int:
    """Returns where the last `num_tokens` tokens of a text begin: 0 if the text has no more."""
    return offsets[-num_tokens][0] if len(offsets) > num_tokens else 0


def _mark(num_characters: int) -> str:
    """Returns what stands in a shortened text in the place of so many characters."""
    return f"\n[... {num_characters} characters left out ...]\n"


def _cut_in_middle(text: str, num_characters: int) -> str:
    """Cuts the middle out of a text that has more than so many characters, and writes there what is missing."""
    left_out = len(text) - num_characters
    end = num_characters // 2
    return text if left_out <= 0 else f"{text[: num_characters - end]}{_mark(left_out)}{text[len(text) - end :]}"


def plain_text(text: str) -> str:  # noqa: ARG001 - of Write
    """Returns a text that spells no special token, in the place of any other."""
    return "x"


def _nothing(text: str) -> str:  # noqa: ARG001 - of Write
    return ""


def _is_subsequence(numbers: Sequence[int], of: Sequence[int]) -> bool:
    """Returns whether `of` has all these numbers, in this order; a template may leave tokens of its own out."""
    left = iter(of)
    return all(number in left for number in numbers)
