"""What the actor measures beside its loss: rollout against training probabilities, memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from splitppo.batch import Batch, Column

# Reduces host numbers over ranks: (values, operation) -> values.
Reduce = Callable[[NDArray[np.float64], dist.ReduceOp.RedOpType], NDArray[np.float64]]


def rollout_disagreement(batch: Batch, old_log_probs: Column, reduce: Reduce) -> dict[str, float]:
    """How far rollout engine and training forward differ about the sampled tokens.

    Every rank must call it, with its own rows.

    Args:
        batch: rollout_log_probs and, where given, response_mask.
        old_log_probs: of the training forward.
        reduce: over ranks.

    Returns:
        training/rollout_probs_diff_{max,mean,std} of the probabilities, and rollout_corr/{kl,k3_kl}, the k1 and k3
        estimates of KL(rollout, training), over the response tokens that count; none where none counts.
    """
    training_N = old_log_probs.values.astype(np.float64)
    rollout_N = batch["rollout_log_probs"].values.astype(np.float64)
    if "response_mask" in batch:
        counts_N = batch["response_mask"].values != 0
        training_N, rollout_N = training_N[counts_N], rollout_N[counts_N]
    diff, log_ratio = np.abs(np.exp(training_N) - np.exp(rollout_N)), training_N - rollout_N
    sums = [len(diff), diff.sum(), (diff**2).sum(), -log_ratio.sum(), (np.exp(log_ratio) - 1.0 - log_ratio).sum()]
    count, total, squares, k1, k3 = reduce(np.array(sums, np.float64), dist.ReduceOp.SUM).tolist()
    largest = float(reduce(np.array([diff.max(initial=0.0)], np.float64), dist.ReduceOp.MAX)[0])
    if count == 0:
        return {}
    variance = max(squares - total**2 / count, 0.0) / max(count - 1, 1)
    return {
        "training/rollout_probs_diff_max": largest,
        "training/rollout_probs_diff_mean": total / count,
        "training/rollout_probs_diff_std": variance**0.5,
        "rollout_corr/kl": k1 / count,
        "rollout_corr/k3_kl": k3 / count,
    }


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peak GPU memory of this rank since its start, and main memory in use on its machine, GiB."""
    metrics: dict[str, float] = {}
    if device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 2**30
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 2**30
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        kib = {line.split(":")[0]: int(line.split()[1]) for line in meminfo.read_text().splitlines()}
        metrics["perf/cpu_memory_used_gb"] = (kib["MemTotal"] - kib["MemAvailable"]) / 2**20
    return metrics
