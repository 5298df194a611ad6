"""Finds, by their tokens alone, which contexts of a response return to an earlier turn of it."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


def followed_turns(
    prompt: Tokens, response: Tokens, segments: Sequence[int], turn_ends: Sequence[int]
) -> Iterator[int]:
    """Yields for each later context the turn that it follows, from 1; 0 for a context that begins anew.

    A context follows a turn if it begins with all tokens that the model had seen and said up to the end of that turn,
    and goes on. Of several such turns the last one counts.

    `segments` are the response's values of the column of that name; `turn_ends` has the index of the last token of each
    turn in the response.
    """
    row = np.concatenate([prompt, response])
    # Where each context begins in the row, that of the prompt first.
    begins = [0, *(len(prompt) + start for start in segments[::2])]
    ends = [len(prompt) + end + 1 for end in turn_ends]
    of_turns = [row[_latest(begins, end) : end] for end in ends]
    for begin, length in zip(begins[1:], segments[1::2], strict=True):
        context = row[begin : begin + length]
        earlier = [turn for turn, end in enumerate(ends, 1) if end <= begin]
        yield next((turn for turn in reversed(earlier) if _goes_on_from(of_turns[turn - 1], context)), 0)


def _latest(begins: Sequence[int], end: int) -> int:
    """Returns where the context begins that holds the token before `end`."""
    return begins[int(np.searchsorted(begins, end)) - 1]


def _goes_on_from(beginning: Tokens, context: Tokens) -> bool:
    """Returns True if a context begins with these tokens, at least one, and has further ones."""
    length = len(beginning)
    if not 0 < length < len(context) or context[length - 1] != beginning[-1]:  # the last one differs for most
        return False
    return bool((context[:length] == beginning).all())
