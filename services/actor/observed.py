"""Keeps what the forwards of an update compute for some rows: the log-probs and entropies of their response tokens.

The loss needs both anyway, so that nothing else is computed, and the update is the same bit for bit.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitppo.batch import Batch, Column

_OUTPUTS = {"update_log_probs": "log_probs", "update_entropy": "entropy"}


class Observed:
    """The outputs of the last forward of each row with `observed` 1, without gradient; an `Observe` of the engine.

    Nothing is kept if the batch has no column `observed`.
    """

    def __init__(self, batch: Batch) -> None:
        self._column = batch.columns.get("observed")
        self._lengths = batch["responses"].lengths
        self._rows = set() if self._column is None else {*np.flatnonzero(self._column.values).tolist()}
        self._seen: dict[int, tuple[Tensor, ...]] = {}  # on the device, which nothing waits for before the end

    def __call__(self, rows: NDArray[np.int64], outputs: Mapping[str, Tensor]) -> None:
        """Keeps the outputs of a micro-batch's rows; without rows these are outputs of a dummy."""
        if not self._rows or not len(rows):
            return
        lengths = self._lengths[rows].tolist()
        parts = zip(*(torch.split(outputs[name].detach(), lengths) for name in _OUTPUTS.values()), strict=True)
        self._seen |= {row: part for row, part in zip(rows.tolist(), parts, strict=True) if row in self._rows}

    def columns(self) -> Batch | None:
        """Returns the columns `update_log_probs` and `update_entropy`, empty for rows that were not used or observed.

        None if the batch has no column `observed`.
        """
        if self._column is None:
            return None
        rows = sorted(self._seen)
        lengths = np.zeros_like(self._lengths)
        lengths[rows] = self._lengths[rows]
        columns = {}
        for place, name in enumerate(_OUTPUTS):
            parts = [self._seen[row][place] for row in rows]
            values = torch.cat(parts).float().cpu().numpy() if parts else np.empty(0, np.float32)
            columns[name] = Column(values, lengths)
        return Batch(len(lengths), columns)
