"""The training engine: runs updates, forward passes and checkpoints of a model on every rank of its group.

Every public method must be called on all ranks, each with its own rows; the ranks of a sequence group have the same
rows, of which each computes its own positions. Losses are weighted by totals of the whole
mini-batch, so a gradient does not depend on micro-batches, padding or the number of ranks.
"""

import functools
import itertools
import logging
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from services.engine.batching.mini_batches import MiniBatch, plan_mini_batches
from services.engine.batching.packing import ResponseTokens, collate, row_lengths
from services.engine.batching.segments import SegmentRows
from services.engine.checkpoint import Checkpointer
from services.engine.compilation import compile_model
from services.engine.flops import FlopsMeter
from services.engine.forward_proof import prove_forward
from services.engine.inference import ReportProgress, compute_columns, micro_batch_limits
from services.engine.model.adapter_checkpoint import AdapterBase
from services.engine.model.adapters import fill_adapters, inject, trained_parameters, whole_weights
from services.engine.model.compiled import only_compiled
from services.engine.model.forward import RESPONSE_METHOD, Forward
from services.engine.model.freezing import freeze_weights
from services.engine.model.loading import (
    PixelLimits,
    build_model,
    describe_architecture,
    fill_model,
    for_generation,
    resolve_folder,
)
from services.engine.model.weights import Kind
from services.engine.optimizer import BucketedAdamW, build_optimizer, learning_rate
from services.engine.recorded_outputs import RecordedOutputs
from services.engine.rest import Rest
from services.engine.strategies.registry import build_strategy, mesh_of
from services.engine.token_metrics import LossOutput, MetricLimit, MetricSums, UpdateSteps, rank_tokens, token_mean
from services.engine.weights_digest import weights_digest
from splitppo import failpoints
from splitppo.batch import Batch, Column
from splitppo.config import TrainedModelConfig

log = logging.getLogger(__name__)

# (outputs of the forward, response tokens of a micro-batch) -> sums over them. The weights of the tokens are made from
# totals of the whole mini-batch, so that losses add up over micro-batches and ranks.
TokenLoss = Callable[[Mapping[str, Tensor], ResponseTokens], LossOutput]


class Updated(NamedTuple):
    """The result of an update: metrics, the same on all ranks, and the outputs of its forwards for recorded rows."""

    metrics: dict[str, float]
    columns: dict[str, Column]


class TrainEngine:
    """A model under training: weights on all ranks, optimizer, schedule; has the checkpoint methods of a `Role`.

    Training begins with the weights of the model's folder; a new value head is 0. With `lora_rank` these weights are
    frozen, in the dtype of the computation, and adapters are trained. The weights that `freeze` names stay as they are,
    and those of a frozen vision tower. `max_response_length` is the fixed length of loss_agg_mode
    seq-mean-token-sum-norm. For `writer_locks` see `Checkpointer`, for `pixel_limits` see `build_model`.

    Attributes:
        compute: runs forward passes over rows, see `compute_columns`.
        strategy: the way in which the ranks hold this model, and the frozen models of the group.
        sequence_group: the ranks that have the same rows as this one; None if there are none.
        weights: with param_offload they rest in main memory, see `Rest`.
        num_updates: RL steps done (of any number of optimizer steps); the learning rate depends on num_updates.

    Raises:
        ValueError: the model cannot be loaded, or its own forward gives other numbers than the engine's.
    """

    def __init__(
        self,
        config: TrainedModelConfig,
        *,
        kind: Kind,
        seed: int,
        max_response_length: int,
        device: torch.device,
        writer_locks: Sequence[Path] = (),
        pixel_limits: PixelLimits = (None, None),
    ) -> None:
        """Builds the model with adapters, shards and fills it, then makes its optimizer, and proves its forward pass.

        The order matters: the model is described before adapters change it, and its weights are counted, and some
        frozen, before sharding divides them; the proof needs their values.
        """
        self.config = config
        self.kind = kind
        self.seed = seed
        self.device = device
        self.max_response_length = max_response_length
        self.num_updates = 0
        is_frozen_bf16 = config.lora_rank and config.dtype == "bf16"
        self.model: Any = build_model(
            config.model,
            kind,
            dtype=torch.bfloat16 if is_frozen_bf16 else torch.float32,
            gradient_checkpointing=config.gradient_checkpointing,
            fp32_head=config.has_fp32_head,
            override_config=config.override_config,
            pixel_limits=pixel_limits,
        )
        self.num_parameters: int = self.model.num_parameters()
        self.architecture = describe_architecture(self.model)
        inject(self.model, config, kind=kind)
        freeze_weights(self.model, config, kind)
        self.num_trainable_parameters = sum(weight.numel() for weight in trained_parameters(self.model).values())
        self.flops_meter = FlopsMeter(self.model, config, device)
        self.sequence_group = mesh_of(config).sequence_group()
        self.limits = micro_batch_limits(config, self.model, self.sequence_group, device)
        self.strategy = build_strategy(device, config)
        self.strategy.shard(self.model, bf16=config.dtype == "bf16", forward_method=RESPONSE_METHOD)
        self._fill()
        self.optimizer = self._fresh_optimizer()
        self.weights = Rest(self.model.parameters, device, is_on=config.param_offload)
        compute = functools.partial(compute_columns, self.model, self.strategy, limits=self.limits, device=device)
        self.compute = self.weights.awake()(only_compiled()(compute))
        base = AdapterBase.of(self.model, config, kind)
        self._checkpointer = Checkpointer(self.model, resolve_folder(config.model), writer_locks, base)
        facts: Any = {"strategy": self.strategy, "limits": self.limits, "device": device, "dtype": config.dtype}
        with self.weights.awake():
            if config.compile:
                compile_model(self.model, kind, config.model, is_trained=True, **facts)
            prove_forward(self.model, kind, config.model, is_trained=True, is_compiled=config.compile, **facts)

    def _fill(self) -> None:
        """Gives the model the weights that training begins with."""
        fill_model(self.model, self.config.model, self.kind)
        fill_adapters(self.model, self.config, kind=self.kind, seed=self.seed)

    def _fresh_optimizer(self) -> BucketedAdamW:
        return build_optimizer(self.model, self.config, seed=self.seed, device=self.device)

    def update(
        self,
        batch: Batch,
        forward: Forward,
        loss: TokenLoss,
        *,
        progress: ReportProgress,
        total_steps: int = 0,
        stop_above: MetricLimit | None = None,
        outputs: Sequence[str] = (),
        keeps_rows: bool = False,
    ) -> Updated:
        """Trains the model on all mini-batches of all epochs of one RL step, in the order of column `mini_batches`.

        Without the column all rows are one mini-batch. Each mini-batch is one optimizer step, or none if no
        token in it counts on any rank (momentum and weights stay unchanged). The update ends before the first step in
        whose mini-batch a metric is over `stop_above`. Rows with several contexts are computed segment by segment; with
        `keeps_rows` the loss sees all segments of a row together.
        `total_steps`, the number of steps of the run, sets the learning rate together with the configuration.

        Returns:
            the metrics of `UpdateSteps`, "lr", "mfu" and "tokens_rank_*"; the named outputs of the rows with `recorded`
            1, by their last forward, as columns that are empty for all other rows.
        """
        started_s = time.perf_counter()
        meter = self.flops_meter
        segments = SegmentRows.of(batch)
        batch = segments.batch
        planned = self.plan_update(batch, keeps_rows=keeps_rows)
        mini_batches = [mini_batch for mini_batch in planned if mini_batch.num_tokens]
        steps = UpdateSteps(num_empty=len(planned) - len(mini_batches))
        if steps.num_empty:
            log.warning("%d of %d mini-batches hold no token to learn from: left out", steps.num_empty, len(planned))
        lr = learning_rate(self.config, self.num_updates + 1, total_steps)
        num_micro_batches = sum(len(mini_batch.micro_batches) for mini_batch in mini_batches)
        done = itertools.count(1)
        computed = list[MiniBatch]()
        recorded = RecordedOutputs(outputs, segments)

        def report() -> None:
            progress(next(done), num_micro_batches, "update")

        with self.weights.awake():
            for number, mini_batch in enumerate(mini_batches):
                if number:
                    failpoints.hit("update.mini_batch")
                computed.append(mini_batch)
                sums = self.accumulate_gradients(batch, mini_batch, forward, loss, report=report, recorded=recorded)
                if stop_above is not None and token_mean(sums, stop_above.metric, self.device) > stop_above.value:
                    self.optimizer.zero_grad(set_to_none=True)
                    steps.num_stopped = len(mini_batches) - number
                    break
                self._checkpointer.wait_until_written(progress)
                steps.steps.append((sums, self._optimizer_step(lr)))
        metrics = {
            **steps.metrics(may_stop=stop_above is not None),  # on the host: the device is done
            **rank_tokens(row_lengths(batch).sum() / self.config.ulysses_sequence_parallel_size, self.device),
            **meter.utilisation(meter.update_flops(batch, computed), time.perf_counter() - started_s),
            "lr": lr,
        }
        updated = Updated(metrics, recorded.columns())
        self.num_updates += 1  # last: an update that fails before it counts for nothing
        return updated

    def plan_update(self, batch: Batch, *, keeps_rows: bool = False) -> list[MiniBatch]:
        """Divides an update's rows of one context into mini-batches, see `plan_mini_batches`; all ranks call it.

        Mini-batches in which no token counts are among them.
        """
        return plan_mini_batches(
            batch, self.config, self.limits, self.max_response_length, self.device, keeps_rows=keeps_rows
        )

    @only_compiled()
    def accumulate_gradients(
        self,
        batch: Batch,
        mini_batch: MiniBatch,
        forward: Forward,
        loss: TokenLoss,
        *,
        report: Callable[[], None] = lambda: None,
        recorded: RecordedOutputs | None = None,
    ) -> MetricSums:
        """Computes the gradient of one mini-batch, summed over ranks; returns this rank's sums for the metrics.

        The rows of `batch` have one context each, as for `plan_update`. `recorded` keeps the outputs of the rows that
        are recorded.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self.model.train()
        sums: list[MetricSums] = []
        for rows in mini_batch.micro_batches:
            micro_batch = collate(
                batch.take(rows), mini_batch.weights[rows], self.limits, device=self.device, epoch=mini_batch.epoch
            )
            with self.strategy.sync_gradients(self.model, last=len(sums) + 1 == len(mini_batch.micro_batches)):
                outputs = forward(self.model, micro_batch)
                if recorded is not None:
                    recorded.add(rows, outputs)
                output = loss(outputs, micro_batch.tokens)
                output.loss.backward()  # type: ignore[no-untyped-call]
            sums.append(MetricSums.of(output, micro_batch.tokens.mask, self.config.ulysses_sequence_parallel_size))
            report()
        self.model.eval()
        return functools.reduce(operator.add, sums)

    def _optimizer_step(self, lr: float) -> float:
        """Clips the gradient and applies an optimizer step if the norm is finite; returns the norm before clipping."""
        norm = self.strategy.clip_gradients(self.model.parameters(), self.config.grad_clip)
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            with self.weights.awake(changes=True):
                self.optimizer.step()
        else:
            log.error("gradient norm is %s: optimizer step skipped", norm)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """Gives the `with` block the model with whole weights on every rank, in eval mode with sdpa, for generation.

        Within the block each rank may call the model any number of times, under torch.no_grad (inference_mode would
        leave tensors behind that training cannot use).
        """
        with self.weights.awake():
            self.strategy.gather(self.model)
            try:
                with for_generation(self.model) as model:
                    yield model
            finally:
                self.strategy.release(self.model)

    def whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, whole tensor) of each parameter, tied ones once; every rank must take them all.

        Adapters are merged into copies, layer by layer.
        """
        self.strategy.release(self.model)
        copy = self.config.param_offload  # else a tensor that the reader still has would lose its memory
        with self.weights.awake():
            yield from whole_weights(self.model, dtype, copy=copy)

    def save_checkpoint(self, directory: Path, service_state: bytes, *, with_hf_model: bool) -> Future[str]:
        """Starts to write a checkpoint in the background; see `Checkpointer.save`."""
        return self._checkpointer.save(
            directory,
            self.optimizer,
            at_rest=self.weights.copies,
            num_updates=self.num_updates,
            service_state=service_state,
            with_hf_model=with_hf_model,
        )

    def check_checkpoint(self, directory: Path) -> None:
        """Checks that the checkpoint in a folder is whole and fits this model; see `checkpoint.check_checkpoint`."""
        self._checkpointer.check(directory)

    def load_checkpoint(self, directory: Path | None, progress: ReportProgress = lambda *_: None) -> bytes:
        """Loads a checkpoint from any number of ranks, or for None the initial weights and a fresh optimizer.

        `progress` is called while this waits for a save that is still being written.

        Raises:
            ValueError: the checkpoint is missing, torn, or of another model.
        """
        self.strategy.release(self.model)
        with self.weights.awake(changes=True, of_frozen=True):
            if directory is None:
                self._checkpointer.wait_until_written(progress)
                self._fill()
                self.optimizer = self._fresh_optimizer()
                self.num_updates = 0
                service_state = b""
            else:
                self.num_updates, service_state = self._checkpointer.load(directory, self.optimizer, progress)
        return service_state

    def compute_weights_digest(self) -> str:
        """Returns the sha256 of the model's weights; see `weights_digest`."""
        with self.weights.awake():
            return weights_digest(self.model)
