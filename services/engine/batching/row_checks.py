"""Checks once, before a command runs, that a model can take the rows of a batch (pure functions)."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitppo.batch import Batch, Column
from splitppo.config.rope import rope_switch


def check_rows(batch: Batch, model: Any, *, room: int = 0) -> Batch:
    """Checks that a model can take the prompts, responses and float32 columns of a batch; returns the batch.

    `room` tokens are still to be sampled in each row; the model must take them, too, and with the same rotary factors.

    Raises:
        ValueError: no rows, an empty prompt, a token id outside the vocabulary, a row too long, NaN or infinity.
    """
    if batch.num_rows == 0:
        raise ValueError("the batch has no rows")
    lengths = batch["prompts"].lengths.astype(np.int64)
    if not lengths.all():
        raise ValueError(f"the prompt of row {int(np.argmin(lengths))} is empty")
    for name in ("prompts", "responses"):
        if name in batch:
            check_ids(batch[name], name, model)
    if "responses" in batch:
        lengths = lengths + batch["responses"].lengths
    longest = int(lengths.max()) + room
    most = most_positions(model.config)
    if longest > most:
        of = f" of prompt and response ({room} of them to be sampled)" if room else " of prompt and response"
        raise ValueError(f"row {int(lengths.argmax())} has {longest} tokens{of}, the model takes {most}")
    _check_same_rotation(longest, room, model)
    for name, column in batch.columns.items():
        if column.values.dtype == np.float32:
            refuse(column, ~np.isfinite(column.values), name, "a finite number")
    return batch


def _check_same_rotation(longest: int, room: int, model: Any) -> None:
    """Raises ValueError if `room` tokens are sampled in rows whose first tokens would then be rotated otherwise."""
    switch = rope_switch(model.config.get_text_config().to_dict()) if room else None
    if switch is not None and longest > switch:
        raise ValueError(
            f"a row may grow to {longest} tokens, but the model has longrope: it rotates rows of over {switch} tokens"
            " by other factors than those with which their first tokens are sampled"
        )


def check_sequences(batch: Batch, name: str, model: Any) -> None:
    """Checks that a model can take a column whose rows are whole sequences of token ids.

    Raises:
        ValueError: an empty row, a token id outside the vocabulary, a row too long.
    """
    column = batch[name]
    most = most_positions(model.config)
    if not column.lengths.all():
        raise ValueError(
            f"column {name!r}, row {int(np.argmin(column.lengths))}: expected at least one token, got none"
        )
    check_ids(column, name, model)
    longest = int(column.lengths.argmax())
    if column.lengths[longest] > most:
        length = f"{column.lengths[longest]} tokens"
        raise ValueError(f"column {name!r}, row {longest}: expected at most {most} tokens, got {length}")


def check_ids(column: Column, name: str, model: Any) -> None:
    """Raises ValueError for a token id outside the vocabulary of a model."""
    vocab_size = model.config.get_text_config().vocab_size
    ids = column.values
    refuse(column, (ids < 0) | (ids >= vocab_size), name, f"a token id in [0, {vocab_size})")


def most_positions(config: Any) -> int:
    """Returns the largest number of tokens that a row of a model may have; sys.maxsize if it has no limit."""
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None) or -1
    return most if most > 0 else sys.maxsize


def refuse(column: Column, wrong: NDArray[np.bool_], name: str, expected: str) -> None:
    """Raises ValueError with the first value of a column that is marked in `wrong`, if there is any."""
    if wrong.any():
        index = int(np.argmax(wrong))
        row = int(np.searchsorted(column.offsets, index, side="right")) - 1
        raise ValueError(f"column {name!r}, row {row}: expected {expected}, got {column.values[index]}")
