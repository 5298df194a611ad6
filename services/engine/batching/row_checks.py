"""Checks once, before a command runs, that a model can take the rows of a batch (pure functions)."""

import logging
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.batching.loss_aggregation import response_mask
from splitppo.batch import Batch, Column
from splitppo.config.rope import rope_switch
from splitppo.images.columns import IMAGE_COLUMNS, check_row
from splitppo.segments import Segments

log = logging.getLogger(__name__)


def check_rows(batch: Batch, model: Any, *, room: int = 0) -> Batch:
    """Checks that a model can take the tokens, the images and the float32 columns of a batch; returns the batch.

    Of a row with several contexts the model must take each segment. `room` tokens are still to be sampled in each row;
    the model must take them, too, and with the same rotary factors.

    Raises:
        ValueError: no rows, an empty prompt, a token id outside the vocabulary, a row too long, NaN or infinity; or see
            `check_images` and `Segments.of`.
    """
    if batch.num_rows == 0:
        raise ValueError("the batch has no rows")
    lengths = batch["prompts"].lengths.astype(np.int64)
    if not lengths.all():
        raise ValueError(f"the prompt of row {int(np.argmin(lengths))} is empty")
    for name in ("prompts", "responses", "privileged_tokens"):
        if name in batch:
            check_ids(batch[name], name, model)
    check_images(batch, model)
    rows = np.arange(batch.num_rows)
    if "responses" in batch:
        segments = Segments.of(batch)
        lengths = segments.lengths(batch)
        rows = segments.rows
    _check_longest(lengths, rows, room, model, privileged=batch.plain_columns.get("privileged_tokens"))
    _check_same_rotation(int(lengths.max()) + room, room, model)
    for name, column in batch.plain_columns.items():
        if column.values.dtype == np.float32:
            refuse(column, ~np.isfinite(column.values), name, "a finite number")
    return batch


def _check_longest(
    lengths: NDArray[np.int64], rows: NDArray[np.int64], room: int, model: Any, *, privileged: Column | None
) -> None:
    """Raises ValueError if the longest segment, of these lengths and of these rows, is too long with `room` tokens.

    The lengths include those of the column `privileged_tokens`.
    """
    longest = int(lengths.argmax())
    num_tokens = int(lengths[longest]) + room
    most = most_positions(model.config)
    if num_tokens > most:
        row = rows[longest]
        of = "prompt and response" if np.count_nonzero(rows == row) == 1 else "one of its contexts and what follows"
        of = of if privileged is None else f"privileged_tokens ({privileged.lengths[row]}), {of}"
        sampled = f" ({room} of them to be sampled)" if room else ""
        raise ValueError(f"row {row} has {num_tokens} tokens of {of}{sampled}, the model takes {most}")


def _check_same_rotation(longest: int, room: int, model: Any) -> None:
    """Raises ValueError if `room` tokens are sampled in rows whose first tokens would then be rotated otherwise."""
    switch = rope_switch(model.config.get_text_config().to_dict()) if room else None
    if switch is not None and longest > switch:
        raise ValueError(
            f"a row may grow to {longest} tokens, but the model has longrope: it rotates rows of over {switch} tokens"
            " by other factors than those with which their first tokens are sampled"
        )


def check_contexts_are_masked(batch: Batch) -> None:
    """Raises ValueError if a token of a context that begins in a response counts: nobody has sampled it."""
    segments = Segments.of(batch)
    begins = batch["responses"].offsets[:-1][segments.rows] + segments.begins
    counted_before = np.concatenate([[0], np.cumsum(response_mask(batch).values != 0)])
    num_counted = counted_before[begins + segments.contexts] - counted_before[begins]
    for segment in np.flatnonzero(num_counted):
        raise ValueError(
            f"column 'response_mask', row {segments.rows[segment]}: expected 0 for the {segments.contexts[segment]}"
            f" tokens of the context that begins at {segments.begins[segment]}, got {num_counted[segment]} that count"
        )


def check_one_rotation(batch: Batch, model: Any, because: str) -> None:
    """Raises ValueError if the segments of a row cannot share a micro-batch, as they have to `because` of a loss.

    longrope rotates segments of over `rope_switch` tokens by other factors, and a micro-batch has one kind of them.
    """
    switch = rope_switch(model.config.get_text_config().to_dict())
    if switch is None:
        return
    segments = Segments.of(batch)
    is_long = segments.lengths(batch) > switch
    num_long = np.bincount(segments.rows, weights=is_long)
    for row in np.flatnonzero((num_long > 0) & (num_long < np.bincount(segments.rows))):
        raise ValueError(
            f"row {row} has segments of up to {switch} tokens and longer ones, which the model (longrope) rotates by"
            f" other factors, so that they cannot share a micro-batch, but {because}"
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


def has_images(batch: Batch) -> bool:
    """Returns True if a row of a batch has an image."""
    return "image_sizes" in batch and bool(batch["image_sizes"].lengths.any())


def check_images(batch: Batch, model: Any) -> None:
    """Checks that prompts have the image tokens that their images need, and no others; nothing is decoded.

    Raises:
        ValueError: a column comes alone, the model has no vision tower, there are image tokens and no images, or see
            `check_row`.
    """
    present = [name for name in IMAGE_COLUMNS if name in batch]
    if len(present) == 1:
        raise ValueError(f"expected the columns {' and '.join(IMAGE_COLUMNS)} together, got only {present[0]}")
    settings = getattr(model, "image_settings", None)
    prompts = batch["prompts"]
    if settings is None:
        if has_images(batch):
            raise ValueError("the model has no vision tower, but column 'images' is not empty")
    elif not present:
        is_image = prompts.values == settings.image_token_id
        refuse(prompts, is_image, "prompts", "no image token, because there is no column 'images'")
    else:
        rows = zip(prompts.rows(), batch["images"].rows(), batch["image_sizes"].rows(), strict=True)
        for row, (prompt, files, sizes) in enumerate(rows):
            check_row(prompt, files, sizes, settings, row=row)


def check_ids(column: Column, name: str, model: Any) -> None:
    """Raises ValueError for a token id outside the vocabulary of a model."""
    vocab_size = model.config.get_text_config().vocab_size
    ids = column.values
    refuse(column, (ids < 0) | (ids >= vocab_size), name, f"a token id in [0, {vocab_size})")


def with_known_ids(batch: Batch, model: Any, num_policy_ids: float) -> Batch:
    """Returns the batch with responses in which ids of the policy that a value model lacks are its last id.

    An embedding may have more rows than the tokenizer has tokens, and a policy may sample such an id, if rarely; a
    critic with a smaller embedding has none for it. The critic says of the tokens before a position what they are
    worth, and any function of these tokens leaves the policy's gradient unbiased, this one, too. The other models of
    the group read the ids that were sampled. Prompts are not changed: all of their ids have a token. An id that the
    policy, with `num_policy_ids`, lacks as well stays.
    """
    if "responses" not in batch:
        return batch
    column = batch["responses"]
    last = model.config.get_text_config().vocab_size - 1
    unknown = (column.values > last) & (column.values < num_policy_ids)
    if not unknown.any():
        return batch
    index = int(np.argmax(unknown))
    row = int(np.searchsorted(column.offsets, index, side="right")) - 1
    log.warning(
        "%d sampled ids are none of this critic, such as %d in row %d: it reads them as its last, %d",
        np.count_nonzero(unknown),
        column.values[index],
        row,
        last,
    )
    known = np.where(unknown, last, column.values).astype(column.values.dtype)
    return batch.merge(Batch(batch.num_rows, {"responses": Column(known, column.lengths)}))


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
