"""Neighbouring rows of a ragged batch, as many as are worth padding at a time."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def blocks(lengths_B: NDArray[np.int32], num_tokens: int, *, num_samples: int = 1) -> Iterator[tuple[int, int]]:
    """(start, stop) of neighbouring rows, at most `num_tokens` when padded; the samples of a prompt never part.

    Few tokens, and float64 arrays of them stay in a core's cache; many, and the recursion over a response's tokens
    takes more responses per call.
    """
    num_rows = num_samples * max(1, num_tokens // (num_samples * int(lengths_B.max(initial=1))))
    return ((start, min(start + num_rows, len(lengths_B))) for start in range(0, len(lengths_B), num_rows))
