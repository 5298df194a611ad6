"""Keeps what the forwards of an update compute for the rows that are recorded, until the update returns it as columns.

The loss needs these outputs anyway: nothing else is computed for them, and the update is the same bit for bit.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.batching.segments import SegmentRows
from splitppo.batch import Column


class RecordedOutputs:
    """The named outputs of forwards, without gradient, for the rows of a batch whose column `recorded` is 1.

    A row that goes through several forwards has the outputs of the last one. Without the column no row is kept.
    """

    def __init__(self, names: Sequence[str], segments: SegmentRows) -> None:
        self._names = names
        self._segments = segments
        self._lengths = segments.batch["responses"].lengths
        self._recorded = set[int]()  # segments
        if names and "recorded" in segments.batch:
            self._recorded.update(np.flatnonzero(segments.batch["recorded"].values).tolist())
        self._outputs: dict[int, list[Tensor]] = {}  # on the device, which nothing waits for before the end

    def add(self, segments: NDArray[np.int64], outputs: Mapping[str, Tensor]) -> None:
        """Keeps the outputs of a micro-batch's segments, [N] each; without segments they are those of a dummy."""
        if not self._recorded or not len(segments):
            return
        lengths = self._lengths[segments].tolist()
        parts = zip(*(torch.split(outputs[name].detach(), lengths) for name in self._names), strict=True)
        for segment, of_segment in zip(segments.tolist(), parts, strict=True):
            if segment in self._recorded:
                self._outputs[segment] = list(of_segment)

    def columns(self) -> dict[str, Column]:
        """Returns a float32 column for each name; rows that are not recorded, or that no forward had, are empty."""
        computed = sorted(self._outputs)
        lengths = np.zeros_like(self._lengths)
        lengths[computed] = self._lengths[computed]
        rows = np.zeros(len(self._segments.response_lengths), np.bool_)
        rows[self._segments.rows[computed]] = True
        columns = {}
        for place, name in enumerate(self._names):
            parts = [self._outputs[segment][place] for segment in computed]
            values = torch.cat(parts).float().cpu().numpy() if parts else np.empty(0, np.float32)
            columns[name] = self._segments.put_back(Column(values, lengths), rows)
        return columns
