"""Checks of a Generate whose responses are cut after a number of tokens, or go on after tokens that they have."""

from typing import Any

import numpy as np

from services.engine.batching.row_checks import check_ids
from services.rollout.protocol import Sampling
from services.rollout.stopping import StopRule
from splitppo.batch import Batch
from splitppo.v1 import actor_pb2

BEGUN_COLUMNS = ("begun_responses", "begun_log_probs")


def check_cuts(request: actor_pb2.GenerateRequest, batch: Batch) -> None:
    """Raises ValueError if responses are cut or go on that are conversations, or that are sent in parts."""
    begun = [name for name in BEGUN_COLUMNS if name in batch]
    because = "max_step_tokens" if request.max_step_tokens else " and ".join(begun)
    if not because:
        return
    if request.HasField("conversation"):
        raise ValueError(f"expected no conversation with {because}: only responses of one turn can be cut and go on")
    if request.num_parts > 1:
        raise ValueError(f"num_parts must be 0 with {because}: responses that can go on are not streamed")


def check_begun(batch: Batch, sampling: Sampling, stop_rule: StopRule, model: Any) -> None:
    """Checks the tokens that responses have already; without the columns of BEGUN_COLUMNS there is nothing to check.

    Raises:
        ValueError: a token is outside the model's vocabulary or has no log-prob, a row has several seeds, or a response
            has ended.
    """
    present = [name for name in BEGUN_COLUMNS if name in batch]
    if not present:
        return
    if len(present) < len(BEGUN_COLUMNS):
        raise ValueError(f"expected the columns {' and '.join(BEGUN_COLUMNS)} together, got only {present[0]}")
    begun = batch["begun_responses"]
    check_ids(begun, "begun_responses", model)
    num_log_probs = batch["begun_log_probs"].lengths
    for row in np.flatnonzero(num_log_probs != begun.lengths):
        raise ValueError(
            f"column 'begun_log_probs', row {row}: expected a value for each of the {begun.lengths[row]} tokens of"
            f" begun_responses, got {num_log_probs[row]}"
        )
    num_seeds = batch["seeds"].lengths.max(initial=1)
    if num_seeds > 1:
        raise ValueError(f"with begun_responses a row must have one seed, got {num_seeds}")
    rows = zip(batch["prompts"].rows(), begun.rows(), batch["seeds"].values.tolist(), strict=True)
    for row, (prompt, tokens, seed) in enumerate(rows):
        if len(tokens) >= sampling.max_response_length:
            raise ValueError(
                f"column 'begun_responses', row {row}: expected fewer than max_response_length"
                f" ({sampling.max_response_length}) tokens, got {len(tokens)}"
            )
        if stop_rule.has_ended(prompt, tokens.tolist(), seed, sampling):
            raise ValueError(
                f"column 'begun_responses', row {row}: expected a response that goes on, but one of its tokens ends it,"
                " or it has the length that is forced"
            )
