"""Runs forward passes without gradient over any number of batch rows, in micro-batches."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from services.engine.batching.mini_batches import agree_on_micro_batches
from services.engine.batching.packing import MicroBatchLimits, collate, row_lengths
from services.engine.model.forward import Forward
from services.engine.model.loading import supports_packing
from services.engine.strategies.protocol import Strategy
from splitppo.batch import Batch, Column
from splitppo.config import ComputedModelConfig

# (done, total, phase), at micro-batch boundaries.
ReportProgress = Callable[[int, int, str], None]


def micro_batch_limits(config: ComputedModelConfig, model: nn.Module) -> MicroBatchLimits:
    """Reads the limits of micro-batches from the configuration; by default rows are packed if the model allows it.

    Raises:
        ValueError: packing is configured, but the model cannot take packed rows.
    """
    packed, can_pack = config.use_remove_padding, supports_packing(model)
    if packed is None:
        packed = can_pack
    if packed and not can_pack:
        raise ValueError(f"use_remove_padding: rows of {type(model).__name__} cannot be packed, set it to false")
    return MicroBatchLimits(packed, config.ppo_max_token_len_per_gpu, config.ppo_micro_batch_size_per_gpu)


def compute_columns(
    model: nn.Module,
    strategy: Strategy,
    batch: Batch,
    forward: Forward,
    *,
    outputs: Sequence[str],
    limits: MicroBatchLimits,
    device: torch.device,
    progress: ReportProgress,
) -> dict[str, Column]:
    """Computes the named outputs of `forward` per response token of each row, without gradient; all ranks call it."""
    rows = np.flatnonzero(batch["responses"].lengths)
    [micro_batches] = agree_on_micro_batches([rows], row_lengths(batch), limits, device)
    results = []
    with torch.no_grad():
        for done, part in enumerate(micro_batches, start=1):
            micro_batch = collate(batch.take(part), None, packed=limits.packed, device=device)
            named = forward(model, micro_batch)
            if len(part):
                results.append(torch.stack([named[name].float() for name in outputs]))
            progress(done, len(micro_batches), "forward")
    strategy.release(model)

    values = torch.cat(results, dim=1).cpu().numpy() if results else np.empty((len(outputs), 0), np.float32)
    empty_rows = np.flatnonzero(batch["responses"].lengths == 0)
    order = np.concatenate([*micro_batches, empty_rows]).astype(np.int64)
    in_order = batch["responses"].lengths[order]
    return {
        name: Column(np.ascontiguousarray(values[index]), in_order).take(np.argsort(order))
        for index, name in enumerate(outputs)
    }
