"""Builds the AdamW optimizer of a trained model, and computes its learning-rate schedule."""

import math

import torch
from torch import nn

from splitppo.config import TrainedModelConfig


def build_optimizer(model: nn.Module, config: TrainedModelConfig) -> torch.optim.AdamW:
    """Builds AdamW over the trained, fp32 parameters of a model; the caller sets the learning rate before each step."""
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(config: TrainedModelConfig, step: int) -> float:
    """Computes the learning rate of RL step `step`, counted from 1.

    With W = lr_warmup_steps, S = W + lr_stable_steps, D = lr_decay_steps, f = lr_min_ratio:

        step <= W:      lr * step / W                                 never 0, `lr` at step W
        W < step <= S:  lr                                            WSD (Hu et al., 2024, MiniCPM, eq. 1)
        step > S:       constant  lr
                        linear    lr * (f + (1 - f) * (1 - p))        p = min(1, (step - 1 - S) / max(1, D - S))
                        cosine    lr * (f + (1 - f) * (1 + cos(pi * p)) / 2)

    The decay counts the steps that are done, as LambdaLR does: it begins at `lr`, is still above its minimum in step D,
    and reaches it in the step after.
    """
    if step <= config.lr_warmup_steps:
        return config.lr * step / config.lr_warmup_steps
    stable = config.lr_warmup_steps + config.lr_stable_steps
    if step <= stable or config.lr_schedule == "constant" or config.lr_decay_steps is None:
        return config.lr
    progress = min(1.0, (step - 1 - stable) / max(1, config.lr_decay_steps - stable))
    remaining = 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.lr_min_ratio + (1.0 - config.lr_min_ratio) * remaining)
