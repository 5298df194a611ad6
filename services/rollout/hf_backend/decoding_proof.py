"""Proves at a start that decoding with a KV cache gives the logits of the model's own forward, on a few short rows."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from services.engine.forward_proof import (
    DType,
    Row,
    as_bad_input,
    bound_of,
    check_difference,
    difference_from_itself,
    own_outputs,
    rows_of,
    rows_with_images,
)
from services.rollout.hf_backend.decoding import DecodedRows

_NUM_DECODED = 4  # tokens of each row
_NUM_TOGETHER = 2  # of them with all rows; then rows are left out and change places, as when some have ended


@torch.no_grad()
def prove_decoding(
    gathered: Callable[[], AbstractContextManager[Any]], name: str, device: torch.device, dtype: DType
) -> None:
    """Compares the log-probs of a few decoded tokens with those of whole forward passes; all ranks call it.

    `gathered` gives the model with whole weights, see `PolicyWeights`; `name` is the model's, for the error. All rows
    are decoded for _NUM_TOGETHER tokens; then the first and the last one alone go on to _NUM_DECODED tokens.

    Raises:
        ValueError: they differ by more than rounding explains, or the model cannot decode.
    """
    with gathered() as model:
        proved = [*rows_of(model.config, "policy"), *rows_with_images(model)]
        rows = [_shortened(row, _NUM_DECODED) for row in proved]
        rows = [row for row in rows if len(row.response) == len(rows[0].response)]  # they are decoded together
        kept = [_shortened(row, _NUM_TOGETHER) for row in rows]
        # The first row and the last one are decoded to the end.
        kept[0] = rows[0]
        kept[-1] = rows[-1]
        subject = f"{name}: rollout.backend hf cannot sample with {model.config.model_type}"
        with as_bad_input(subject):
            decoded_N = _decode(model, rows, device)
            own_N, largest = own_outputs(model, "policy", kept, device)
            itself = difference_from_itself(model, "policy", kept, device, own_N, dtype)
    bound = bound_of(itself, own_N, "policy", dtype, largest)
    check_difference(
        decoded_N, own_N, "policy", bound, f"{subject}: its decoding gives other log-probs than its forward"
    )


def _shortened(row: Row, num_tokens: int) -> Row:
    return row._replace(response=row.response[:num_tokens])


def _decode(model: Any, rows: Sequence[Row], device: torch.device) -> Tensor:
    """Decodes the responses token by token, as if they were sampled; returns the log-probs row by row, [N].

    After _NUM_TOGETHER tokens only the last row and the first one go on, in this order.
    """
    decoded = DecodedRows(model, [row.prompt for row in rows], device, images=[row.images for row in rows])
    places = [*range(len(rows))]
    log_probs: list[list[Tensor]] = [[] for _ in rows]
    for step in range(len(rows[0].response)):
        if step == _NUM_TOGETHER and len(rows) > 1:
            places = [places[-1], places[0]]
            decoded.keep(places)
        tokens_R = torch.tensor([int(rows[place].response[step]) for place in places], device=device)
        computed_R = decoded.logits.float().log_softmax(-1).gather(-1, tokens_R[:, None])[:, 0]
        for place, log_prob in zip(places, computed_R, strict=True):
            log_probs[place].append(log_prob)
        decoded.append(tokens_R)
    return torch.stack([log_prob for row in log_probs for log_prob in row])
