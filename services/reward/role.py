"""Defines the role of the reward group, which runs a reward model and teachers, and trains nothing.

The group has no ledger and no checkpoint: after a restart it loads its models and goes on.
"""

from services.roles.frozen_models import FrozenModels
from splitppo.config import Config, ConfigError
from splitppo.v1 import worker_pb2


def check_config(config: Config) -> None:
    """Raises ConfigError unless the run has a reward group."""
    if "reward" not in config.roles:
        values = f"{config.reward_model.model!r}, and placement.reward_model is {config.placement.reward_model}"
        raise ConfigError(
            f"this run has no reward group: reward_model.model is {values}; expected a model, and reward, or"
            f" placement.teacher reward instead of {config.placement.teacher}"
        )


class RewardRole(FrozenModels):
    """The reward group's role: implements the services of frozen models; see `runtime.role.Role`.

    Raises:
        ValueError: a model cannot be loaded.
    """

    role = worker_pb2.ROLE_REWARD
