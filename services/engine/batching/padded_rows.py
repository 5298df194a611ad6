"""Divides packed rows into groups of similar lengths, for attention that takes no packed rows, only padded ones."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.batching.on_device import on_device


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """The rows of a micro-batch of S packed tokens, right-padded in groups; made once, for the attention of all layers.

    In a group no row is shorter than half of the longest one, so padding at most doubles the tokens, and there are at
    most log2(longest / shortest) + 1 groups.

    Attributes:
        positions: for each group, the place of every token among the packed ones, [rows, length of the longest row]
            int64; padding repeats the last token of its row.
        places: where each packed token is in the groups, one behind the other, [S] int64.
    """

    positions: tuple[Tensor, ...]
    places: Tensor

    @classmethod
    def of(cls, lengths: NDArray[np.int64], device: torch.device) -> "PaddedRows":
        """Groups the rows of these lengths, of which some may be 0.

        A group begins with the longest row left and takes all rows of at least half its length, so less than half of a
        group is padding.
        """
        starts = np.cumsum(lengths) - lengths
        longest_first = np.argsort(-lengths, kind="stable")
        positions: list[NDArray[np.int64]] = []
        places = np.empty(lengths.sum(), np.int64)
        begin = 0
        num_padded = 0
        end = np.count_nonzero(lengths)
        while begin < end:
            longest = lengths[longest_first[begin]]
            group = longest_first[begin:end]
            group = group[2 * lengths[group] >= longest]
            columns = np.arange(longest)
            of_group = starts[group, None] + np.minimum(columns, lengths[group, None] - 1)
            is_token = columns < lengths[group, None]
            places[of_group[is_token]] = num_padded + np.flatnonzero(is_token)
            positions.append(of_group)
            begin += len(group)
            num_padded += of_group.size
        return cls(tuple(on_device(array, device) for array in positions), on_device(places, device))
