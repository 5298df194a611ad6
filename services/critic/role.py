"""The commands of the critic: compute values, update the value model and, if placed here, frozen models.

Every command runs on every rank at the same time; each rank has its own rows, and the results are gathered.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from services.critic.losses import critic_loss
from services.engine.batching.row_checks import with_known_ids
from services.engine.model.forward import value_forward
from services.roles.sharding import shard_by_mini_batch
from services.roles.trained_role import TrainedRole
from services.runtime.command import Command, CommandProgress, Effect, Outcome, Rows
from services.runtime.context import RankContext
from splitppo.batch import Batch
from splitppo.config import Config, ConfigError
from splitppo.config.sections.models import MOST_EPOCHS
from splitppo.images.columns import IMAGE_COLUMNS
from splitppo.model_folder import local_folder, read_json
from splitppo.v1 import critic_pb2, worker_pb2

# What the value model reads beside prompts and responses. No other command of the group takes privileged_tokens from a
# slot: the frozen models beside the value model never get them.
_ALSO_READ = ("segments", "privileged_tokens", *IMAGE_COLUMNS)


def check_config(config: Config) -> None:
    """Raises ConfigError unless the run uses a critic."""
    if not config.uses_critic:
        raise ConfigError(f"algorithm.adv_estimator {config.algorithm.adv_estimator!r} uses no critic")


def _num_policy_ids(config: Config) -> float:
    """Returns the number of ids that the policy may sample; infinity if its config.json is not to be had here.

    It is 0 if the critic has begun as the policy, since it has the same ids then.
    """
    if config.critic.model == config.actor.model:
        return 0
    try:
        description = read_json(local_folder(config.actor.model, ["config.json"]) / "config.json")
    except (ValueError, OSError):
        return math.inf
    sizes = {**description.get("text_config", {}), **description}
    return float(sizes.get("vocab_size", math.inf))


def give_cache_back(command: Command, context: RankContext) -> Command:
    """Lets a command free cached GPU memory at its end if the rollout group takes turns on the critic's GPUs."""
    if not context.config.rollout_shares_devices or context.device.type != "cuda":
        return command

    def run(request: Any, rows: Any, progress: CommandProgress) -> Outcome:
        outcome = command.run(request, rows, progress)
        torch.cuda.empty_cache()
        return outcome

    return replace(command, run=run)


class CriticRole(TrainedRole):
    """The critic's role: implements CriticService and the services of frozen models; see `runtime.role.Role`.

    Raises:
        ValueError: a model cannot be loaded.
    """

    role = worker_pb2.ROLE_CRITIC

    def __init__(self, context: RankContext) -> None:
        super().__init__(context, context.config.critic, kind="value", forward=value_forward)
        self._loss = critic_loss(context.config.critic)
        self._num_policy_ids = _num_policy_ids(context.config)

    def commands(self) -> Sequence[Command]:
        """Returns the commands ComputeValues and Update, and those of frozen models."""
        values = critic_pb2.ComputeValuesRequest
        update = critic_pb2.CriticUpdateRequest
        learned_from = ("prompts", "responses", "values", "returns")
        update_rows = Rows(
            columns=learned_from,
            optional_columns=(*_ALSO_READ, "response_mask"),
            prepare=self._with_known_ids(self._prepare_update),
            shard=shard_by_mini_batch,
        )
        forward_rows = self.forward_rows(_ALSO_READ)
        forward_rows = replace(forward_rows, prepare=self._with_known_ids(forward_rows.prepare))
        return self.commands_of_models(
            Command("ComputeValues", values, Effect.WRITES_SLOT, self.compute_values, forward_rows),
            Command("Update", update, Effect.TRAINS, self.update, update_rows),
        )

    def _with_known_ids(self, prepare: Callable[[Any, Batch], Batch]) -> Callable[[Any, Batch], Batch]:
        """Returns `prepare` for rows in which ids that the value model lacks are its last one."""
        return lambda request, batch: prepare(request, with_known_ids(batch, self._engine.model, self._num_policy_ids))

    def compute_values(
        self, _request: critic_pb2.ComputeValuesRequest, batch: Batch, progress: CommandProgress
    ) -> Outcome:
        """Computes the value of the state before each response token, as the column `values`."""
        computed = self._engine.compute(batch, value_forward, outputs=("values",), progress=progress)
        return Outcome(columns=Batch(batch.num_rows, computed))

    def _prepare_update(self, request: critic_pb2.CriticUpdateRequest, batch: Batch) -> Batch:
        """Checks the request and its rows, see `prepare_update`; ValueError for an impossible number of passes."""
        if not 0 <= request.num_epochs <= MOST_EPOCHS:
            raise ValueError(
                f"num_epochs: expected 1 to {MOST_EPOCHS} passes over the rows, or 0 for critic.ppo_epochs, got"
                f" {request.num_epochs}"
            )
        return self.prepare_update(request, batch, num_epochs=request.num_epochs)

    def update(self, request: critic_pb2.CriticUpdateRequest, batch: Batch, progress: CommandProgress) -> Outcome:
        """Trains the value model on all mini-batches of all epochs of one step."""
        return Outcome(metrics=self.train(request, batch, self._loss, progress).metrics)
