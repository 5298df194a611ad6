"""The characters of a decoded response that each of its tokens holds.

The spans of a response's tokens are neighbours and make up its text: a character belongs to one token, of several that
hold bytes of it to the one that completes it. A token without a character of its own (a special one, the first bytes of
a character) has an empty span.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from operator import eq
from typing import Any

from numpy.typing import NDArray

from controller.data.tokenizer import Tokenizer
from rewards.samples import Span


class TokenSpans(Sequence[Span]):
    """[start, end) in `text`, in characters, of each of the tokens `ids`, which decode to it.

    They are computed when first looked at: most responses are scored without them.
    """

    def __init__(self, tokenizer: Tokenizer, ids: NDArray[Any], text: str) -> None:
        self._tokenizer, self._ids, self._text = tokenizer, ids, text

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: Any) -> Any:
        return self._spans[index]

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    @cached_property
    def _spans(self) -> Sequence[Span]:
        return tuple(pairwise((0, *token_ends(self._tokenizer, self._ids.tolist(), self._text))))


def token_ends(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> Sequence[int]:
    """Returns where the characters of each token end in `text`, which the tokens decode to."""
    pieces = tokenizer.pieces(ids)
    if "".join(pieces) == text:
        return tuple(accumulate(map(len, pieces)))
    # Tokens that are no text by themselves: parts of characters, or of words whose spaces depend on what is before.
    ends = list(_ends_by_windows(tokenizer, ids, text))
    return (*ends[:-1], len(text)) if ends else ()


def _ends_by_windows(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> Iterator[int]:
    """Yields the same: each token is decoded behind the last ones whose text is known, and compared with `text`.

    ids[known:open] are decoded as text[:base] ends; what ids[open:] add grows until it is the text that follows.
    """
    known, opened, base, end = 0, 0, 0, 0
    for index in range(len(ids)):
        context, window = (tokenizer.decode(ids[known:stop]) for stop in (opened, index + 1))
        added = window[len(context) :]
        num_right = _num_equal(added, text[base : base + len(added)])
        end = max(end, base + num_right)
        if added and num_right == len(added):
            known, opened, base = opened, index + 1, end
        yield end


def _num_equal(text: Iterable[str], other: Iterable[str]) -> int:
    """Characters that both begin with."""
    return sum(takewhile(bool, map(eq, text, other)))
