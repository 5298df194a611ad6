"""The critic: the value model in training, as commands of a service.

Every command runs on every rank at the same time, each with its own rows; the shell gathers what they return.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from services.critic.losses import critic_loss
from services.engine.assignment import assign_mini_batches
from services.engine.forward import value_forward
from services.engine.row_checks import check_rows
from services.engine.token_metrics import metrics_of_role, token_means
from services.engine.train_engine import TrainEngine
from services.shell.commands import Command, Outcome, Report
from services.shell.context import RankContext
from services.shell.sharding import shard_by_mini_batch, shard_by_tokens
from splitppo.batch import Batch
from splitppo.v1 import critic_pb2, worker_pb2


class CriticRole:
    """Behind CriticService; see `services.shell.commands.Role`.

    Raises:
        ValueError: the model cannot be loaded.
    """

    role = worker_pb2.ROLE_CRITIC

    def __init__(self, context: RankContext) -> None:
        config = context.config
        self._config = config
        self._model = TrainEngine(
            config.critic,
            kind="value",
            seed=config.run.seed,
            max_response_length=config.data.max_response_length,
            device=context.device,
        )
        self._forward = value_forward()
        self._loss = critic_loss(config.critic)
        self.num_parameters = self._model.num_parameters
        self.model = self._model.architecture

    def commands(self) -> Sequence[Command]:
        """ComputeValues, Update."""
        return (
            Command(
                "ComputeValues",
                critic_pb2.ComputeValuesRequest,
                self.compute_values,
                columns=("prompts", "responses"),
                prepare=self._prepare_compute_values,
                shard=shard_by_tokens,
            ),
            Command(
                "Update",
                critic_pb2.CriticUpdateRequest,
                self.update,
                columns=("prompts", "responses", "values", "returns"),
                optional_columns=("response_mask",),
                prepare=self._prepare_update,
                shard=shard_by_mini_batch,
                commits=True,
            ),
        )

    def compute_values(
        self, _request: critic_pb2.ComputeValuesRequest, batch: Batch | None, progress: Report
    ) -> Outcome:
        """Values of the states before each response token."""
        assert batch is not None
        computed = self._model.compute(batch, self._forward, outputs=("values",), progress=progress)
        return Outcome(columns=Batch(batch.num_rows, computed))

    def update(self, _request: critic_pb2.CriticUpdateRequest, batch: Batch | None, progress: Report) -> Outcome:
        """One update of the value model: all mini-batches of all epochs."""
        assert batch is not None
        metrics = token_means(self._model.update(batch, self._forward, self._loss, progress=progress))
        return Outcome(metrics=metrics_of_role("critic", metrics))

    def save_checkpoint(self, directory: Path, service_state: bytes, *, with_hf_model: bool) -> Future[str]:
        """See `Role.save_checkpoint`."""
        return self._model.save(directory, service_state, with_hf_model=with_hf_model)

    def check_checkpoint(self, directory: Path) -> None:
        """See `Role.check_checkpoint`."""
        self._model.check(directory)

    def load_checkpoint(self, directory: Path | None) -> bytes:
        """See `Role.load_checkpoint`."""
        if directory is not None:
            return self._model.load(directory)
        self._model.load_initial()
        return b""

    def compute_weights_digest(self) -> str:
        """See `Role.compute_weights_digest`."""
        return self._model.weights_digest()

    def _prepare_compute_values(self, _request: critic_pb2.ComputeValuesRequest, batch: Batch) -> Batch:
        self._check(batch)
        return batch

    def _prepare_update(self, request: critic_pb2.CriticUpdateRequest, batch: Batch) -> Batch:
        self._check(batch)
        critic = self._config.critic
        mini_batch_rows = critic.ppo_mini_batch_size and critic.ppo_mini_batch_size * self._config.rollout.n
        mini_batches = assign_mini_batches(
            batch.num_rows,
            mini_batch_rows,
            critic.ppo_epochs,
            shuffle=critic.shuffle,
            seed=self._config.run.seed,
            step=request.slot.step,
        )
        return batch.merge(Batch(batch.num_rows, {"mini_batches": mini_batches}))

    def _check(self, batch: Batch) -> None:
        model = self._model.model.config.get_text_config()
        check_rows(batch, vocab_size=model.vocab_size, max_positions=getattr(model, "max_position_embeddings", None))
