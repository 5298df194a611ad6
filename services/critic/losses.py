"""The value loss per response token.

Shapes: N response tokens of all rows of a micro-batch, packed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, clip_range: float
) -> tuple[Tensor, Tensor]:
    """Half the larger of two squared errors: of the value, and of the value clipped around the old one.

    Once a value has moved further than clip_range towards its return, it gets no more gradient (OpenAI baselines,
    ppo2).

    Args:
        values_N: [N] float32, of the model in training.
        old_values_N: [N] float32, of the model that the experience was collected with.
        returns_N: [N] float32, regression targets.
        clip_range: positive, in units of the return.

    Returns:
        (loss [N] float32, clipped [N] bool: the clipped error is the larger one).
    """
    clipped_values_N = torch.clamp(values_N, old_values_N - clip_range, old_values_N + clip_range)
    error_N = (values_N - returns_N).square()
    clipped_error_N = (clipped_values_N - returns_N).square()
    return 0.5 * torch.maximum(error_N, clipped_error_N), clipped_error_N > error_N
