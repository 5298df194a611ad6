"""Keeps what the forwards of an update compute for the rows that are recorded, until the update returns it as columns.

The loss needs these outputs anyway: nothing else is computed for them, and the update is the same bit for bit.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitppo.batch import Batch, Column


class RecordedOutputs:
    """The named outputs of forwards, without gradient, for the rows of a batch whose column `recorded` is 1.

    A row that goes through several forwards has the outputs of the last one. Without the column no row is kept.
    """

    def __init__(self, names: Sequence[str], batch: Batch) -> None:
        self._names = names
        self._lengths = batch["responses"].lengths
        self._rows = set[int]()
        if names and "recorded" in batch:
            self._rows.update(np.flatnonzero(batch["recorded"].values).tolist())
        self._outputs: dict[int, list[Tensor]] = {}  # on the device, which nothing waits for before the end

    def add(self, rows: NDArray[np.int64], outputs: Mapping[str, Tensor]) -> None:
        """Keeps the outputs of a micro-batch's rows, [N] each; without rows they are those of a dummy."""
        if not self._rows or not len(rows):
            return
        lengths = self._lengths[rows].tolist()
        parts = zip(*(torch.split(outputs[name].detach(), lengths) for name in self._names), strict=True)
        for row, of_row in zip(rows.tolist(), parts, strict=True):
            if row in self._rows:
                self._outputs[row] = list(of_row)

    def columns(self) -> dict[str, Column]:
        """Returns a float32 column for each name; rows that are not recorded, or that no forward had, are empty."""
        rows = sorted(self._outputs)
        lengths = np.zeros_like(self._lengths)
        lengths[rows] = self._lengths[rows]
        columns = {}
        for place, name in enumerate(self._names):
            parts = [self._outputs[row][place] for row in rows]
            values = torch.cat(parts).float().cpu().numpy() if parts else np.empty(0, np.float32)
            columns[name] = Column(values, lengths)
        return columns
