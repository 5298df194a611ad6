"""The frozen reward model, as a command of whichever group hosts it (`placement.reward_model`)."""

from typing import Any

import numpy as np

from services.engine.batching.row_checks import check_sequences
from services.engine.frozen_model import FrozenModel
from services.engine.model.forward import reward_forward
from services.runtime.context import RankContext
from services.runtime.ranks.sharding import shard_by_tokens
from services.runtime.role import Command, CommandProgress, Outcome
from splitppo.batch import Batch, Column
from splitppo.config import Config
from splitppo.v1 import reward_model_pb2


class FrozenRewardModel:
    """Behind RewardModelService: a sequence classifier, loaded on every rank together where this group hosts it.

    Its rows are the column `reward_tokens`, which needs no prompts or responses beside it.

    Raises:
        ValueError: the model cannot be loaded, or has not one label.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._model: FrozenModel | None = None
        if context.config.reward_model_host == context.role_name:
            self._model = FrozenModel(context.config.reward_model, kind="reward", device=context.device)

    def command(self) -> Command:
        """ComputeRewardScores; a group that does not host the reward model says who does."""
        return Command(
            "ComputeRewardScores",
            reward_model_pb2.ComputeRewardScoresRequest,
            self.compute_reward_scores,
            columns=("reward_tokens",),
            check=self._check,
            prepare=self._prepare,
            shard=shard_by_tokens,
        )

    def compute_reward_scores(
        self, _request: reward_model_pb2.ComputeRewardScoresRequest, batch: Batch, progress: CommandProgress
    ) -> Outcome:
        """The score at the last token of each row."""
        assert self._model is not None
        computed = self._model.compute(batch, reward_forward, outputs=("scores",), progress=progress)
        return Outcome(columns=Batch(batch.num_rows, {"rm_scores": computed["scores"]}))

    def _check(self, _request: Any) -> None:
        if self._model is None:
            raise ValueError(_why_not_here(self._context.config, self._context.role_name))

    def _prepare(self, _request: Any, batch: Batch) -> Batch:
        """Rows as the engine computes them: the last token is the response, what is before it the prompt."""
        assert self._model is not None
        check_sequences(batch, "reward_tokens", self._model.model)
        tokens = batch["reward_tokens"]
        is_last = np.zeros(len(tokens.values), np.bool_)
        is_last[tokens.offsets[1:] - 1] = True
        prompts = Column(tokens.values[~is_last], tokens.lengths - np.int32(1))
        responses = Column(tokens.values[is_last], np.ones_like(tokens.lengths))
        return Batch(batch.num_rows, {"prompts": prompts, "responses": responses})


def _why_not_here(config: Config, role: str) -> str:
    """What the caller of a group without the reward model is told."""
    if config.reward_model_host is None:
        return f"the {role} holds no reward model: reward_model.model is empty"
    return f"the {role} holds no reward model: placement.reward_model is {config.reward_model_host}, call that group"
