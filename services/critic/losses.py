"""Computes the clipped value loss of the critic per response token.

Shapes: N response tokens of all rows of a micro-batch, packed.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from services.engine.batching.packing import ResponseTokens
from services.engine.token_metrics import LossOutput
from splitppo.config.sections.models import CriticConfig


def clipped_value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, clip_range: float
) -> tuple[Tensor, Tensor]:
    """Computes half the larger squared error per token: of the value, or of the value clipped near the old value.

        loss = 1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)

    v_old is the value at the time of the experience. Once a value has moved further than c = clip_range towards its
    return R, it gets no more gradient (OpenAI baselines, ppo2).

    Returns:
        (loss [N] float32, clipped [N] bool: the clipped error is the larger one).
    """
    clipped_values_N = torch.clamp(values_N, old_values_N - clip_range, old_values_N + clip_range)
    error_N = (values_N - returns_N).square()
    clipped_error_N = (clipped_values_N - returns_N).square()
    return 0.5 * torch.maximum(error_N, clipped_error_N), clipped_error_N > error_N


def critic_loss(config: CriticConfig) -> Callable[[Mapping[str, Tensor], ResponseTokens], LossOutput]:
    """Makes the function that computes the critic's clipped value loss and metrics for one micro-batch.

    The loss reads the output values, and the columns values (the old values) and returns. The metrics are vf_loss,
    weighted as the loss is, and the token means vf_clipfrac and vpred_mean.
    """

    def loss(outputs: Mapping[str, Tensor], tokens: ResponseTokens) -> LossOutput:
        values_N = outputs["values"]
        token_loss_N, clipped_N = clipped_value_loss(
            values_N, tokens.columns["values"], tokens.columns["returns"], clip_range=config.cliprange_value
        )
        total = (tokens.weights * token_loss_N).sum()
        return LossOutput(total, {"vf_loss": total}, {"vf_clipfrac": clipped_N.float(), "vpred_mean": values_N})

    return loss
