"""Checks once, before a command runs, that a model can take the rows of a batch (pure functions)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitppo.batch import Batch, Column


def check_rows(batch: Batch, model: Any, *, room: int = 0) -> Batch:
    """Checks that a model can take the prompts, responses and float32 columns of a batch; returns the batch.

    `room` tokens are still to be sampled in each row; the model must take them, too.

    Raises:
        ValueError: no rows, an empty prompt, a token id outside the vocabulary, a row too long, NaN or infinity.
    """
    config = model.config.get_text_config()
    vocab_size, max_positions = config.vocab_size, getattr(config, "max_position_embeddings", None)
    if batch.num_rows == 0:
        raise ValueError("the batch has no rows")
    lengths = batch["prompts"].lengths.astype(np.int64)
    if not lengths.all():
        raise ValueError(f"the prompt of row {int(np.argmin(lengths))} is empty")
    for name in ("prompts", "responses"):
        if name in batch:
            ids = batch[name].values
            _refuse(batch[name], (ids < 0) | (ids >= vocab_size), name, f"a token id in [0, {vocab_size})")
    if "responses" in batch:
        lengths = lengths + batch["responses"].lengths
    longest = int(lengths.max()) + room
    if max_positions is not None and longest > max_positions:
        of = f" of prompt and response ({room} of them to be sampled)" if room else " of prompt and response"
        raise ValueError(f"row {int(lengths.argmax())} has {longest} tokens{of}, the model takes {max_positions}")
    for name, column in batch.columns.items():
        if column.values.dtype == np.float32:
            _refuse(column, ~np.isfinite(column.values), name, "a finite number")
    return batch


def check_sequences(batch: Batch, name: str, model: Any) -> None:
    """Checks that a model can take a column whose rows are whole sequences of token ids.

    Raises:
        ValueError: an empty row, a token id outside the vocabulary, a row too long.
    """
    config = model.config.get_text_config()
    column, vocab_size = batch[name], config.vocab_size
    max_positions = getattr(config, "max_position_embeddings", None)
    if not column.lengths.all():
        raise ValueError(
            f"column {name!r}, row {int(np.argmin(column.lengths))}: expected at least one token, got none"
        )
    _refuse(column, (column.values < 0) | (column.values >= vocab_size), name, f"a token id in [0, {vocab_size})")
    longest = int(column.lengths.argmax())
    if max_positions is not None and column.lengths[longest] > max_positions:
        length = f"{column.lengths[longest]} tokens"
        raise ValueError(f"column {name!r}, row {longest}: expected at most {max_positions} tokens, got {length}")


def _refuse(column: Column, wrong: NDArray[np.bool_], name: str, expected: str) -> None:
    if wrong.any():
        index = int(np.argmax(wrong))
        row = int(np.searchsorted(column.offsets, index, side="right")) - 1
        raise ValueError(f"column {name!r}, row {row}: expected {expected}, got {column.values[index]}")
