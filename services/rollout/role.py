"""The commands of the rollout group: take over a published version of the policy's weights, and sample with it.

The group trains nothing and has no checkpoint. Its state is the version that it holds.
"""

import time
from collections.abc import Iterator, Sequence

from services.engine.model_check import check_model
from services.rollout.backends import BACKENDS, prove_sampling
from services.rollout.generation import Generation
from services.rollout.weight_sync import SyncedWeights
from services.runtime.command import Command, CommandProgress, Effect, Outcome
from services.runtime.context import RankContext
from splitppo.config import Config, ConfigError
from splitppo.config.rollout_packages import check_rollout_packages
from splitppo.config.section import RoleName
from splitppo.v1 import rollout_pb2, worker_pb2


def check_config(config: Config) -> None:
    """Raises ConfigError unless the rollout group samples, and the package of its backend is installed."""
    if "rollout" not in config.sampling_roles:
        raise ConfigError(
            "this run has no rollout group: rollout.share is 0, expected more (auto is 0 on the critic's devices if the"
            " critic's update takes longer than the actor's)"
        )
    check_rollout_packages(config, "rollout")


def check_models(role_name: RoleName, config: Config) -> Iterator[str]:
    """Proves the policy that the group samples with, as the folder of the actor has it; yields a line."""
    devices = config.services.of(role_name).devices
    limits = config.data.pixel_limits
    proof = prove_sampling(config)
    yield check_model("actor.model", config.actor, "policy", devices=devices, also=proof, pixel_limits=limits)


class RolloutRole:
    """The rollout group's role: implements RolloutService; see `runtime.role.Role`.

    Raises:
        ValueError: the model cannot be built, or the backend refuses the configuration.
    """

    role = worker_pb2.ROLE_ROLLOUT

    def __init__(self, context: RankContext) -> None:
        backend = BACKENDS[context.config.rollout.backend]
        backend.check(context.config)
        self._weights = SyncedWeights(context, holds_copy=backend.samples_with_policy)
        self._generation = Generation(context, self._weights, rest=self._weights.rest)
        if context.config.rollout_shares_devices:
            self._generation.give_back()  # the critic's group computes before the first sync
        self.num_parameters = self._weights.num_parameters
        self.reads_images = self._weights.model.image_settings is not None

    def commands(self) -> Sequence[Command]:
        """Returns the commands SyncWeights and Generate."""
        sync = rollout_pb2.SyncWeightsRequest
        service = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"]
        return (
            Command("SyncWeights", sync, Effect.LOADS, self.sync_weights, check=self._weights.check),
            self._generation.command(service),
        )

    def sync_weights(self, request: rollout_pb2.SyncWeightsRequest, _rows: None, progress: CommandProgress) -> Outcome:
        """Loads a published version into the backend, which forgets all that it computed with another one."""
        started_s = time.perf_counter()
        self._generation.suspend(weights_change=True)
        self._weights.load(request)
        progress(1, 2, "sync")
        self._generation.update_weights(request.version)
        progress(2, 2, "sync")
        return Outcome(metrics={"timing_s/sync": time.perf_counter() - started_s})
