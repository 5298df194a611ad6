"""Implements what actor and critic share: a model in training, checks of its rows, updates, metrics, checkpoints."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from services.engine.batching.mini_batches import assign_mini_batches
from services.engine.batching.row_checks import check_contexts_are_masked, check_rows
from services.engine.inference import ReportProgress
from services.engine.model.forward import Forward
from services.engine.model.weights import Kind
from services.engine.token_metrics import MetricLimit, metrics_of_role
from services.engine.train_engine import TokenLoss, TrainEngine, Updated
from services.roles.frozen_models import FrozenModels
from services.roles.sharding import shard_by_tokens
from services.runtime.command import Command, CommandProgress, Rows
from services.runtime.context import RankContext
from services.runtime.ranks.row_group import RowGroup
from splitppo.batch import Batch
from splitppo.config.sections.models import TrainedModelConfig
from splitppo.images.columns import IMAGE_COLUMNS


class TrainedRole:
    """A trained model (policy or value model) on one rank, its checkpoints, and the frozen models beside it.

    Built on every rank together; see `runtime.role.CheckpointedRole`.

    Raises:
        ValueError: a model cannot be loaded.
    """

    def __init__(self, context: RankContext, config: TrainedModelConfig, *, kind: Kind, forward: Forward) -> None:
        self._context = context
        self._forward = forward
        self._engine = engine = TrainEngine(
            config,
            kind=kind,
            seed=context.config.run.seed,
            max_response_length=context.config.data.max_response_length,
            device=context.device,
            writer_locks=context.writer_locks,
            pixel_limits=context.config.data.pixel_limits,
        )
        self._rows = RowGroup(context.rank, config.ulysses_sequence_parallel_size)
        self._frozen = FrozenModels(context, engine, before=self.make_room)
        self.num_parameters = engine.num_parameters
        self.model = engine.architecture
        self.num_trainable_parameters = engine.num_trainable_parameters
        self.reads_images = engine.model.image_settings is not None
        self.check_checkpoint = engine.check_checkpoint

    def make_room(self, *, weights_change: bool = False) -> None:
        """Called before a model of this role computes, is saved or loaded: what samples beside it gives memory back."""

    def commands_of_models(self, *commands: Command) -> Sequence[Command]:
        """Returns these commands of the trained model and those of frozen models; ranks that share rows run them so."""
        return [self._rows.share_rows_of(command) for command in (*commands, *self._frozen.commands())]

    def forward_rows(self, optional_columns: Sequence[str] = ("segments", *IMAGE_COLUMNS)) -> Rows:
        """Returns the rows of a command that runs forward passes of the trained model, which must be able to."""
        prepare = partial(_checked_rows, self._engine.model)
        columns = ("prompts", "responses")
        return Rows(columns=columns, optional_columns=optional_columns, prepare=prepare, shard=shard_by_tokens)

    def save_checkpoint(self, directory: Path, service_state: bytes, *, with_hf_model: bool) -> Future[str]:
        """Starts to save the trained model, see `Role.save_checkpoint`; other models of the group are not saved."""
        self.make_room()
        return self._engine.save_checkpoint(directory, service_state, with_hf_model=with_hf_model)

    def load_checkpoint(self, directory: Path | None, progress: ReportProgress = lambda *_: None) -> bytes:
        self.make_room(weights_change=True)
        return self._engine.load_checkpoint(directory, progress)

    def compute_weights_digest(self) -> str:
        self.make_room()
        return self._engine.compute_weights_digest()

    def prepare_update(self, request: Any, batch: Batch, *, num_epochs: int = 0) -> Batch:
        """Checks the request and its rows, and returns the rows with the column `mini_batches`.

        There are `num_epochs` passes over the rows; 0: `ppo_epochs`.

        Raises:
            ValueError: the rows cannot be trained on, or the learning rate depends on the number of steps of the run,
                which the request does not say.
        """
        check_rows(batch, self._engine.model)
        check_contexts_are_masked(batch)
        config = self._engine.config
        num_prompts = config.ppo_mini_batch_size  # None: all rows are one mini-batch
        fewest = 1 if config.needs_total_steps else 0
        if request.total_steps < fewest:
            raise ValueError(
                f"total_steps: expected the number of steps of the run, {fewest} or more, got {request.total_steps}"
            )
        mini_batches = assign_mini_batches(
            batch.num_rows,
            num_prompts and num_prompts * self._context.config.rollout.n,
            num_epochs or config.ppo_epochs,
            shuffle=config.shuffle,
            seed=self._context.config.run.seed,
            step=request.slot.step,
        )
        return batch.merge(Batch(batch.num_rows, {"mini_batches": mini_batches}))

    def train(
        self,
        request: Any,
        batch: Batch,
        loss: TokenLoss,
        progress: CommandProgress,
        *,
        stop_above: MetricLimit | None = None,
        outputs: Sequence[str] = (),
        keeps_rows: bool = False,
    ) -> Updated:
        """Trains on all mini-batches of all epochs of the request's step; the metrics have the role's prefix.

        `outputs` are those of recorded rows that are returned as columns; for these and `keeps_rows` see
        `TrainEngine.update`.
        """
        updated = self._engine.update(
            batch,
            self._forward,
            loss,
            progress=progress,
            total_steps=request.total_steps,
            stop_above=stop_above,
            outputs=outputs,
            keeps_rows=keeps_rows,
        )
        return updated._replace(metrics=metrics_of_role(self._context.role_name, updated.metrics))


def _checked_rows(model: Any, _request: Any, batch: Batch) -> Batch:
    return check_rows(batch, model)
