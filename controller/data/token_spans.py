"""Finds the characters of a decoded response that belong to each of its tokens.

The spans of consecutive tokens are adjacent, and together they are the text. A character belongs to exactly one token:
if several tokens have bytes of the character, to the token that completes it. A token without a character of its own (a
special token, the first bytes of a character) has an empty span.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from os.path import commonprefix
from typing import Any

from numpy.typing import NDArray

from controller.data.tokenizer import Tokenizer
from rewards.samples import Span


class TokenSpans(Sequence[Span]):
    """The characters [start, end) of a decoded response that belong to each token; `ids` decode to `text`.

    The spans are computed at the first access, because most responses are scored without them.
    """

    def __init__(self, tokenizer: Tokenizer, ids: NDArray[Any], text: str) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self._text = text

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: Any) -> Any:
        return self._spans[index]

    @cached_property
    def _spans(self) -> Sequence[Span]:
        return tuple(pairwise((0, *token_ends(self._tokenizer, self._ids.tolist(), self._text))))


def token_ends(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> Sequence[int]:
    """Returns where each token ends in `text`, in characters; the tokens decode to `text`."""
    pieces = tokenizer.pieces(ids)
    if "".join(pieces) == text:
        return tuple(accumulate(map(len, pieces)))
    # Some tokens have another text by themselves: parts of characters, or words after which a space depends on context.
    ends = list(_ends_by_windows(tokenizer, ids, text))
    return (*ends[:-1], len(text)) if ends else ()


def _ends_by_windows(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> Iterator[int]:
    """Yields where each token ends in `text`, in characters, found by decoding short runs (windows) of tokens.

    A window is ids[start:index + 1]. Its context, ids[start:opened], decodes to the end of text[:base]. The rest of the
    window grows until it decodes to the text that follows.
    """
    start = 0
    opened = 0
    base = 0
    end = 0
    for index in range(len(ids)):
        context, window = (tokenizer.decode(ids[start:stop]) for stop in (opened, index + 1))
        added = window[len(context) :]
        num_right = len(commonprefix((added, text[base : base + len(added)])))  # noqa: RUF071 - of characters
        end = max(end, base + num_right)
        if added and num_right == len(added):
            start = opened
            opened = index + 1
            base = end
        yield end
