"""Defines the role of the reward group, which runs the reward model and trains nothing.

The group has no ledger and no checkpoint: after a restart it loads its model and goes on.
"""

from services.roles.frozen_models import FrozenModels
from splitppo.v1 import worker_pb2


class RewardRole(FrozenModels):
    """The reward group's role: implements RewardModelService and ReferenceService; see `runtime.role.Role`.

    Raises:
        ValueError: the model cannot be loaded.
    """

    role = worker_pb2.ROLE_REWARD
