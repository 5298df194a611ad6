"""Divides the positions of packed rows among the ranks of a sequence group (pure functions: no communication)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class OwnPositions:
    """The positions of a packed micro-batch that this rank of a sequence group computes.

    Attributes:
        group: the ranks that compute the positions of this micro-batch together.
        first, stop: the range of the own positions.
        previous: [N] int64 in host memory, see `MicroBatch.previous`.
    """

    group: ProcessGroup
    first: int
    stop: int
    previous: NDArray[np.int64]

    def tokens(self, shift: int) -> slice:
        """Returns which response tokens have their output at an own position: `shift` after the token before them."""
        start, stop = np.searchsorted(self.previous + shift, (self.first, self.stop))
        return slice(int(start), int(stop))


def own_positions(
    group: ProcessGroup, cu_seq_lens: NDArray[np.int64], previous: NDArray[np.int64]
) -> tuple[OwnPositions, NDArray[np.int64]]:
    """Returns this rank's share of packed rows, and where the rows start if they are padded to equal shares.

    The padding is one more row.
    """
    num_tokens = int(cu_seq_lens[-1])
    share = -(-num_tokens // group.size())
    if padded := share * group.size() - num_tokens:
        cu_seq_lens = np.append(cu_seq_lens, num_tokens + padded)
    first = group.rank() * share
    return OwnPositions(group, first, first + share, previous), cu_seq_lens
