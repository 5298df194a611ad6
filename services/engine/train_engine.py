"""The training engine: everything a trained model does, on every rank of its group.

Every public method must be called on all ranks, with each rank's own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from services.engine.packing import MicroBatch
from splitppo.batch import Batch, Column
from splitppo.config.schema import TrainedModelConfig

# Runs the model; returns named [N] float32 tensors, one value per response token ("log_probs", "entropy" | "values").
Forward = Callable[[nn.Module, MicroBatch], dict[str, Tensor]]
# (outputs of the forward, data columns, weights [N], mask [N]) -> (scalar loss = sum(weights * token losses), metrics).
# Metrics are scalars that are summed over micro-batches and ranks and averaged over mini-batches.
# `data` also holds "row_index" [N] int64, the row of each token inside the micro-batch.
TokenLoss = Callable[
    [Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Tensor], tuple[Tensor, Mapping[str, Tensor]]
]
Kind = Literal["policy", "value"]


class ReportProgress(Protocol):
    """Called at micro-batch boundaries."""

    def __call__(self, done: int, total: int, phase: str) -> None: ...


class FrozenModel:
    """A model that only computes: the reference policy."""

    def __init__(self, config: TrainedModelConfig, *, device: torch.device) -> None: ...

    def compute(
        self, batch: Batch, forward: Forward, *, outputs: Sequence[str], progress: ReportProgress
    ) -> dict[str, Column]:
        """The named outputs of `forward` for every row, in the order of the rows; no gradient."""
        raise NotImplementedError


class TrainEngine:
    """A model under training: sharded weights, optimizer, schedule.

    Args:
        config: actor or critic section.
        kind: policy (causal language model) or value (token classifier with one label).
        seed: of the run; a new value head is a function of (seed, kind).
        max_response_length: fixed length of loss_agg_mode seq-mean-token-sum-norm.
        device: of this rank.
    """

    model: nn.Module
    num_parameters: int

    def __init__(
        self,
        config: TrainedModelConfig,
        *,
        kind: Kind,
        seed: int,
        max_response_length: int,
        device: torch.device,
    ) -> None: ...

    def compute(
        self, batch: Batch, forward: Forward, *, outputs: Sequence[str], progress: ReportProgress
    ) -> dict[str, Column]:
        """The named outputs of `forward` for every row, in the order of the rows; no gradient."""
        raise NotImplementedError

    def update(
        self, batch: Batch, forward: Forward, loss: TokenLoss, *, progress: ReportProgress
    ) -> dict[str, float]:
        """All mini-batches and epochs of one RL step, as the column `mini_batches` orders them (absent: one mini-batch).

        Returns:
            the loss's metrics, "loss", "grad_norm", "lr", "num_skipped_steps", "tokens_rank_min", "tokens_rank_max".
        """
        raise NotImplementedError

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """The Hugging Face model with full weights on every rank, in eval mode with sdpa attention, for generation.

        Unshards once; inside, ranks may call it any number of times, under torch.no_grad (not inference_mode).
        """
        raise NotImplementedError
        yield

    def save(self, directory: Path, extra: bytes, *, with_hf_model: bool) -> Future[None]:
        """Snapshots and writes in the background; resolves when every rank's part is durable. `extra`: rank 0's."""
        raise NotImplementedError

    def load(self, directory: Path) -> bytes:
        """Loads what `save` wrote, at any rank count; returns `extra`. ValueError: missing or not a checkpoint."""
        raise NotImplementedError

    def load_initial(self) -> None:
        """The initial weights, read again, and a fresh optimizer."""
        raise NotImplementedError

    def weights_digest(self) -> str:
        """sha256 over sorted named_parameters, values only, little-endian fp32; the same on every rank."""
        raise NotImplementedError
