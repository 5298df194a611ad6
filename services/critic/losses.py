"""The value loss per response token.

Shapes: N response tokens of all rows of a micro-batch, packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from services.engine.token_metrics import token_sums
from splitppo.config import CriticConfig


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


# (outputs of the forward, data columns, weights [N], mask [N]) -> (loss, metrics)
CriticLoss = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


def critic_loss(config: CriticConfig) -> CriticLoss:
    """The critic's loss: the clipped value loss of the output values to the columns returns and values (the old ones).

    Its metrics are vf_loss, weighted as the loss is, and the token sums of vf_clipfrac and vpred_mean.
    """

    def loss(
        outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor], weights_N: Tensor, mask_N: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        values_N = outputs["values"]
        token_loss_N, clipped_N = clipped_value_loss(
            values_N, columns["values"], columns["returns"], clip_range=config.cliprange_value
        )
        total = (weights_N * token_loss_N).sum()
        means = {"vf_clipfrac": clipped_N.float(), "vpred_mean": values_N}
        return total, {"vf_loss": total.detach(), **token_sums(means, mask_N)}

    return loss
