"""The reward group: the reward model as a command of a service that trains nothing.

It keeps no ledger and no checkpoint: started again, it loads its model and goes on.
"""

from collections.abc import Sequence

from services.roles.frozen_models import FrozenModels
from services.runtime.context import RankContext
from services.runtime.role import Command
from splitppo.v1 import worker_pb2


class RewardRole:
    """Behind RewardModelService and ReferenceService; see `services.runtime.role.Role`.

    Raises:
        ValueError: the model cannot be loaded.
    """

    role = worker_pb2.ROLE_REWARD

    def __init__(self, context: RankContext) -> None:
        self._frozen = FrozenModels(context)
        self.num_parameters = self._frozen.num_parameters

    def commands(self) -> Sequence[Command]:
        """ComputeRefLogProbs, ComputeRewardScores."""
        return self._frozen.commands
