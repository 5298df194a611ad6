"""The reward group: the reward model as a command of a service that trains nothing.

It keeps no ledger and no checkpoint: started again, it loads its model and goes on.
"""

from services.roles.frozen_models import FrozenModels
from splitppo.v1 import worker_pb2


class RewardRole(FrozenModels):
    """Behind RewardModelService and ReferenceService; see `services.runtime.role.Role`.

    Raises:
        ValueError: the model cannot be loaded.
    """

    role = worker_pb2.ROLE_REWARD
