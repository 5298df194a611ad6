"""Implements what actor and critic share: a model in training, checks of its rows, its updates and metrics."""

from typing import Any

from services.engine.batching.mini_batches import assign_mini_batches
from services.engine.batching.row_checks import check_rows
from services.engine.model.forward import Forward
from services.engine.model.weights import Kind
from services.engine.token_metrics import MetricLimit, metrics_of_role
from services.engine.train_engine import TokenLoss, TrainEngine
from services.runtime.context import RankContext
from services.runtime.role import CommandProgress
from splitppo.batch import Batch
from splitppo.config.sections.models import TrainedModelConfig


class TrainedRole:
    """The trained model of a role (policy or value model) on one rank; built on every rank together.

    Raises:
        ValueError: the model cannot be loaded.
    """

    def __init__(self, context: RankContext, config: TrainedModelConfig, *, kind: Kind, forward: Forward) -> None:
        self._context, self._config, self._forward = context, config, forward
        self.engine = TrainEngine(
            config,
            kind=kind,
            seed=context.config.run.seed,
            max_response_length=context.config.data.max_response_length,
            device=context.device,
            writer_locks=context.writer_locks,
        )

    def prepare_forward(self, _request: Any, batch: Batch) -> Batch:
        """Raises ValueError for rows that the model cannot take, else returns them; see `Command.prepare`."""
        return check_rows(batch, self.engine.model)

    def prepare_update(self, request: Any, batch: Batch) -> Batch:
        """Raises ValueError for rows that cannot be trained on; adds the column `mini_batches` to the rows."""
        check_rows(batch, self.engine.model)
        prompts = self._config.ppo_mini_batch_size
        mini_batches = assign_mini_batches(
            batch.num_rows,
            prompts and prompts * self._context.config.rollout.n,
            self._config.ppo_epochs,
            shuffle=self._config.shuffle,
            seed=self._context.config.run.seed,
            step=request.slot.step,
        )
        return batch.merge(Batch(batch.num_rows, {"mini_batches": mini_batches}))

    def update(
        self, batch: Batch, loss: TokenLoss, progress: CommandProgress, *, stop_above: MetricLimit | None = None
    ) -> dict[str, float]:
        """Trains on all mini-batches of all epochs of one PPO step; returns metrics with the role's prefix."""
        metrics = self.engine.update(batch, self._forward, loss, progress=progress, stop_above=stop_above)
        return metrics_of_role(self._context.role_name, metrics)
