"""Functions of several advantage estimators: checks, one score per response, one advantage on all tokens of it.

B sequences (prompts x samples), T response tokens, right-padded. A row may be empty. A mask may have holes (tool
output), which are bridged: "the next token" is the next token inside the mask.
Arguments and results are float32, masks are bool, the arithmetic is float64. Results are zero outside the mask.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.ppo.masked_stats import Float32s, Float64s, Floats, Mask, masked_sum

Integers = NDArray[np.integer[Any]]
AdvantagesAndReturns = tuple[Float32s, Float32s]
# A discount or a lambda: one, or broadcast to [B, T], from each token to the next one in the mask.
Rate = float | Float64s


def check(rewards_BT: Float32s, mask_BT: Mask, *factors: Rate) -> None:
    """Checks that rewards and mask are [B, T], the mask bool, and all factors within [0, 1]; else ValueError."""
    if mask_BT.dtype != np.bool_ or mask_BT.ndim != 2:
        raise ValueError(f"the mask must be [B, T] bool, got {mask_BT.dtype} with shape {mask_BT.shape}")
    if rewards_BT.shape != mask_BT.shape:
        raise ValueError(f"rewards must have the shape of the mask, {mask_BT.shape}, got {rewards_BT.shape}")
    if not all(np.all((np.asarray(factor) >= 0.0) & (np.asarray(factor) <= 1.0)) for factor in factors):
        raise ValueError(f"gamma and lam must lie in [0, 1], got {factors}")


def scores_of(rewards_BT: Float32s, mask_BT: Mask, scored_BT: Mask | None) -> Float64s:
    """Sums the token rewards of each response over `scored_BT`, by default the mask: [B], the score s of a response."""
    check(rewards_BT, mask_BT)
    return masked_sum(rewards_BT, mask_BT if scored_BT is None else scored_BT, axis=1)


def on_every_token(advantage_B: Float64s, mask_BT: Mask) -> AdvantagesAndReturns:
    """Copies the advantage of each response to all of its tokens; returns (advantages, the same array as returns)."""
    advantages_BT = float32(np.broadcast_to(advantage_B[:, None], mask_BT.shape), mask_BT)
    return advantages_BT, advantages_BT.copy()


def float32(values_BT: Floats, mask_BT: Mask) -> Float32s:
    """Converts values to float32 and sets those outside the mask to zero."""
    return np.where(mask_BT, values_BT, 0.0).astype(np.float32)


def turns_of(response_mask_BT: Mask) -> Integers:
    """Numbers the turns of each response, from 1: [B, T], the turn of each token, 0 outside the mask.

    A turn is what lies between two holes. The mask must be that of sampled tokens, before any of them are rejected: an
    answer of the environment has at least one token, and nothing else makes holes.
    """
    begins_BT = np.diff(response_mask_BT.astype(np.int8), axis=1, prepend=0) == 1
    return np.where(response_mask_BT, begins_BT.cumsum(axis=1), 0)


def at_turn_ends(mask_BT: Mask, turns_BT: Integers, inside: Rate, at_end: float | None) -> Rate:
    """Returns the rate from each token to the next one in the mask: `at_end` where a turn ends between them.

    `inside` is the rate within a turn; with an `at_end` of None it is the rate everywhere. The last token of a response
    has a rate without meaning.
    """
    if at_end is None:
        return inside
    rates_BT = np.array(np.broadcast_to(inside, mask_BT.shape), np.float64)
    turns_N = turns_BT[mask_BT]
    is_end_N = np.append(turns_N[1:] != turns_N[:-1], False)  # the next token inside the mask is in another turn
    rates_BT[mask_BT] = np.where(is_end_N, at_end, rates_BT[mask_BT])
    return rates_BT
