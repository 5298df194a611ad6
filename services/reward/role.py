"""Defines the role of the reward group, which runs a reward model and teachers, and trains nothing.

The group has no ledger and no checkpoint: after a restart it loads its models and goes on.
"""

from services.roles.frozen_models import FrozenModels
from splitppo.v1 import worker_pb2


class RewardRole(FrozenModels):
    """The reward group's role: implements the services of frozen models; see `runtime.role.Role`.

    Raises:
        ValueError: a model cannot be loaded.
    """

    role = worker_pb2.ROLE_REWARD
