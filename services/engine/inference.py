"""Forward passes without a gradient, over any number of rows; and models that do nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from services.engine import parallel
from services.engine.forward import Forward
from services.engine.model import RESPONSE_METHOD, load_model, supports_packing
from services.engine.packing import MicroBatchLimits, check_prompts, collate, plan, row_lengths
from splitppo.batch import Batch, Column
from splitppo.config.schema import TrainedModelConfig


class ReportProgress(Protocol):
    """Called at micro-batch boundaries."""

    def __call__(self, done: int, total: int, phase: str) -> None: ...


def micro_batch_limits(config: TrainedModelConfig, model: nn.Module, device: torch.device) -> MicroBatchLimits:
    """What the config says about micro-batches; packed by default on GPU, padded on CPU.

    Raises:
        ValueError: packing is asked for and the model cannot.
    """
    packed = config.use_remove_padding
    if packed is None:
        packed = device.type == "cuda" and supports_packing(model)
    if packed and not supports_packing(model):
        raise ValueError(f"use_remove_padding: rows of {type(model).__name__} cannot be packed, set it to false")
    return MicroBatchLimits(packed, config.ppo_max_token_len_per_gpu, config.ppo_micro_batch_size_per_gpu)


def compute_columns(
    model: nn.Module,
    batch: Batch,
    forward: Forward,
    *,
    outputs: Sequence[str],
    limits: MicroBatchLimits,
    device: torch.device,
    progress: ReportProgress,
) -> dict[str, Column]:
    """The named outputs of `forward` for every row, in the order of the rows.

    Every rank must call it, with its own rows (none is allowed); ranks run equally many micro-batches.
    """
    check_prompts(batch)
    lengths = row_lengths(batch)
    rows = np.flatnonzero(batch["responses"].lengths)
    micro_batches = plan(lengths[rows], limits)
    count = int(parallel.reduce_array([len(micro_batches)], device, dist.ReduceOp.MAX)[0])
    if count > len(micro_batches):
        micro_batches = plan(lengths[rows], limits, at_least=count)
    results = []
    with torch.no_grad():
        for done, part in enumerate(micro_batches, start=1):
            micro_batch = collate(batch.take(rows[part]), None, packed=limits.packed, device=device)
            named = forward(model, micro_batch)
            if len(part):
                results.append(torch.stack([named[name].float() for name in outputs]))
            progress(done, count, "forward")
    parallel.release(model)

    values = torch.cat(results, dim=1).cpu().numpy() if results else np.empty((len(outputs), 0), np.float32)
    empty_rows = np.flatnonzero(batch["responses"].lengths == 0)
    order = np.concatenate([*(rows[part] for part in micro_batches), empty_rows]).astype(np.int64)
    in_order = batch["responses"].lengths[order]
    return {
        name: Column(np.ascontiguousarray(values[index]), in_order).take(np.argsort(order))
        for index, name in enumerate(outputs)
    }


class FrozenModel:
    """A policy that only computes: the reference. Its weights are kept in the compute dtype."""

    def __init__(self, config: TrainedModelConfig, *, device: torch.device) -> None:
        bf16 = config.dtype == "bf16"
        self.model = load_model(config.model, "policy", dtype=torch.bfloat16 if bf16 else torch.float32)
        self.model.requires_grad_(requires_grad=False)
        self.device = device
        self.limits = micro_batch_limits(config, self.model, device)
        parallel.shard(self.model, device=device, bf16=False, forward_methods=[RESPONSE_METHOD["policy"]])

    def compute(
        self, batch: Batch, forward: Forward, *, outputs: Sequence[str], progress: ReportProgress
    ) -> dict[str, Column]:
        """See `compute_columns`."""
        return compute_columns(
            self.model,
            batch,
            forward,
            outputs=outputs,
            limits=self.limits,
            device=self.device,
            progress=progress,
        )
