"""The training engine: everything a trained model does, on every rank of its group.

Every public method must be called on all ranks, each with its own rows. Losses are weighted by totals of the whole
mini-batch, so a gradient does not depend on micro-batches, padding or the number of ranks.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.engine import parallel
from services.engine.checkpoint import Checkpointer, check_checkpoint
from services.engine.digest import count_parameters, weights_digest
from services.engine.flops import FlopsMeter
from services.engine.forward import Forward as Forward
from services.engine.inference import FrozenModel as FrozenModel
from services.engine.inference import ReportProgress, compute_columns, micro_batch_limits
from services.engine.mini_batches import MiniBatch, plan_mini_batches
from services.engine.model import (
    RESPONSE_METHOD,
    Kind,
    describe_architecture,
    load_model,
    resolve_folder,
    set_attention,
)
from services.engine.optimizer import build_optimizer, learning_rate
from services.engine.packing import MicroBatch as MicroBatch
from services.engine.packing import check_prompts, collate, row_lengths
from splitppo import failpoints
from splitppo.batch import Batch, Column
from splitppo.config.schema import TrainedModelConfig

log = logging.getLogger(__name__)

# (outputs of the forward, data of the micro-batch, weights [N], mask [N]) -> (loss, metrics), both sums over tokens:
# loss = sum(weights * token losses). Metrics are scalars, summed over micro-batches and ranks, and averaged
# over mini-batches.
TokenLoss = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Tensor], tuple[Tensor, Mapping[str, Tensor]]]


class TrainEngine:
    """A model under training: sharded weights, optimizer, schedule.

    Args:
        config: actor or critic section.
        kind: policy (causal language model) or value (token classifier with one label).
        seed: of the run; a new value head is a function of (seed, kind).
        max_response_length: fixed length of loss_agg_mode seq-mean-token-sum-norm.
        device: of this rank.

    Attributes:
        num_updates: RL steps that were updated on, however many optimizer steps each of them took, none included; the
            learning rate is a function of it.
        flops_meter: of this rank.

    Raises:
        ValueError: the model cannot be loaded.
    """

    def __init__(
        self, config: TrainedModelConfig, *, kind: Kind, seed: int, max_response_length: int, device: torch.device
    ) -> None:
        self.config, self.kind, self.seed, self.device = config, kind, seed, device
        self.max_response_length = max_response_length
        self.num_updates = 0
        self.model = self._load_model()
        self.num_parameters = count_parameters(self.model)
        self.architecture = describe_architecture(self.model)
        self.flops_meter = FlopsMeter(self.model, config, device)
        self.limits = micro_batch_limits(config, self.model, device)
        bf16 = config.dtype == "bf16"
        parallel.shard(self.model, device=device, bf16=bf16, forward_methods=[RESPONSE_METHOD[kind]])
        self.optimizer = build_optimizer(self.model, config)
        self._checkpointer = Checkpointer(resolve_folder(config.model))

    def compute(
        self, batch: Batch, forward: Forward, *, outputs: Sequence[str], progress: ReportProgress
    ) -> dict[str, Column]:
        """The named outputs of `forward` for every row, in the order of the rows; no gradient."""
        return compute_columns(
            self.model,
            batch,
            forward,
            outputs=outputs,
            limits=self.limits,
            device=self.device,
            progress=progress,
        )

    def update(self, batch: Batch, forward: Forward, loss: TokenLoss, *, progress: ReportProgress) -> dict[str, float]:
        """All mini-batches and epochs of one RL step, as the column `mini_batches` orders them (absent: one).

        Each is an optimizer step, but for those in which no token counts on any rank: from nothing nothing is learned,
        neither by momentum nor by weight decay.

        Returns:
            the loss's metrics, "loss", "grad_norm" (before clipping), means over the optimizer steps that were made and
            absent without any (a gradient that was not finite leaves "grad_norm" as NaN); "lr"; "num_skipped_steps"
            (the gradient was not finite) and "num_empty_steps" (no token counted); the tokens that ranks processed per
            epoch: "tokens_rank_min", "tokens_rank_max", "tokens_rank_mean"; "mfu", model FLOPs utilisation, where it is
            known (services/engine/flops.py). The same on all ranks.
        """
        started_s = time.perf_counter()
        planned = self.plan_update(batch)
        mini_batches = [mini_batch for mini_batch in planned if mini_batch.num_tokens]
        num_empty = len(planned) - len(mini_batches)
        if num_empty:
            log.warning("%d of %d mini-batches hold no token to learn from: left out", num_empty, len(planned))
        total = sum(len(mini_batch.micro_batches) for mini_batch in mini_batches)
        done = itertools.count(1)
        lr = learning_rate(self.config, self.num_updates + 1)

        def report() -> None:
            progress(next(done), total, "update")

        applied: list[dict[str, Tensor]] = []
        norms: list[float] = []
        for number, mini_batch in enumerate(mini_batches):
            if number:
                failpoints.hit("update.mini_batch")
            sums = self.accumulate_gradients(batch, mini_batch, forward, loss, report)
            norm = self._optimizer_step(lr)
            if math.isfinite(norm):
                applied.append(sums)
                norms.append(norm)
        reduced = self._reduced(applied)  # on the host: the device is done
        metrics = {
            **reduced,
            **self._rank_tokens(batch),
            **self.flops_meter.utilisation(batch, time.perf_counter() - started_s),
            "lr": lr,
            "num_skipped_steps": float(len(mini_batches) - len(norms)),
            "num_empty_steps": float(num_empty),
        }
        if mini_batches:
            metrics["grad_norm"] = sum(norms) / len(norms) if norms else math.nan
        self.num_updates += 1
        return metrics

    def plan_update(self, batch: Batch) -> list[MiniBatch]:
        """The optimizer steps of an update, and those that would be if any of their tokens counted."""
        check_prompts(batch)
        return plan_mini_batches(
            batch,
            ppo_epochs=self.config.ppo_epochs,
            limits=self.limits,
            mode=self.config.loss_agg_mode,
            max_response_length=self.max_response_length,
            device=self.device,
        )

    def accumulate_gradients(
        self,
        batch: Batch,
        mini_batch: MiniBatch,
        forward: Forward,
        loss: TokenLoss,
        report: Callable[[], None] = lambda: None,
    ) -> dict[str, Tensor]:
        """Leaves the gradient of one mini-batch in the parameters, summed over ranks.

        Returns:
            "loss" and the loss's metrics, summed over this rank's micro-batches, on the device.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self.model.train()
        sums: dict[str, Tensor] = {}
        for done, rows in enumerate(mini_batch.micro_batches, start=1):
            micro_batch = collate(
                batch.take(rows), mini_batch.weights.take(rows), packed=self.limits.packed, device=self.device
            )
            parallel.sync_gradients(self.model, last=done == len(mini_batch.micro_batches))
            outputs = forward(self.model, micro_batch)
            value, metrics = loss(outputs, micro_batch.data, micro_batch.weights, micro_batch.mask)
            value.backward()  # type: ignore[no-untyped-call]
            for name, metric in {"loss": value, **metrics}.items():
                sums[name] = sums[name] + metric.detach() if name in sums else metric.detach()
            report()
        self.model.eval()
        return sums

    def _optimizer_step(self, lr: float) -> float:
        """Clips and steps; a gradient that is not finite changes nothing. Returns the norm, the same on all ranks."""
        norm = parallel.clip_gradients(self.model.parameters(), self.config.grad_clip)
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        else:
            log.error("gradient norm is %s: optimizer step skipped", norm)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _reduced(self, applied: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sums over ranks, means over the mini-batches that were applied."""
        if not applied:
            return {}
        sums_MK = torch.stack([torch.stack([value.float() for value in metrics.values()]) for metrics in applied])
        means = parallel.all_reduce(sums_MK.mean(0)).tolist()
        return dict(zip(applied[0], means, strict=True))

    def _rank_tokens(self, batch: Batch) -> dict[str, float]:
        tokens = float(row_lengths(batch).sum())
        most, least = parallel.reduce_array([tokens, -tokens], self.device, dist.ReduceOp.MAX)
        total = parallel.reduce_array([tokens], self.device)[0]
        return {
            "tokens_rank_min": float(-least),
            "tokens_rank_max": float(most),
            "tokens_rank_mean": float(total) / parallel.num_ranks(),
        }

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """The Hugging Face model with whole weights on every rank, in eval mode with sdpa attention, for generation.

        Gathers once; inside, each rank may call the model any number of times, under torch.no_grad (inference_mode
        would leave tensors behind that training cannot use).
        """
        parallel.gather(self.model)
        set_attention(self.model, generation=True)
        try:
            yield self.model
        finally:
            set_attention(self.model, generation=False)
            parallel.release(self.model)

    def whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its Hugging Face name, whole, one after the other; tied ones once.

        Every rank must take all of them: sharded ones are gathered on the way, in `dtype`.
        """
        parallel.release(self.model)
        for name, parameter in self.model.named_parameters():
            yield name, parallel.full(parameter.detach().to(dtype))

    def save(self, directory: Path, extra: bytes, *, with_hf_model: bool) -> Future[str]:
        """Snapshots everything and writes in the background, with rank 0's `extra`; resolves when all ranks' parts are
        durable, on rank 0 with the sha256 of the weights in them.
        """
        return self._checkpointer.save(
            directory,
            self.model,
            self.optimizer,
            num_updates=self.num_updates,
            extra=extra,
            with_hf_model=with_hf_model,
        )

    def check(self, directory: Path) -> None:
        """Whether `load` can load it; one rank can ask alone. ValueError if not (see `check_checkpoint`)."""
        check_checkpoint(directory, self.model)

    def load(self, directory: Path) -> bytes:
        """Loads what `save` wrote, from any number of ranks, and returns `extra`.

        Raises:
            ValueError: missing, torn, or of another model.
        """
        parallel.release(self.model)
        self.num_updates, extra = self._checkpointer.load(directory, self.model, self.optimizer)
        return extra

    def load_initial(self) -> None:
        """The initial weights, read again from their folder, and a fresh optimizer."""
        parallel.release(self.model)
        parallel.copy_weights(self._load_model(), self.model)
        self.optimizer = build_optimizer(self.model, self.config)
        self.num_updates = 0

    def weights_digest(self) -> str:
        """sha256 over sorted named_parameters, values only, little-endian fp32; the same on every rank."""
        return weights_digest(self.model)

    def _load_model(self) -> Any:
        return load_model(
            self.config.model,
            self.kind,
            seed=self.seed,
            gradient_checkpointing=self.config.gradient_checkpointing,
        )
