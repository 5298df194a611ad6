"""The frozen reference, as a command of whichever group hosts it (`placement.reference`)."""

from collections.abc import Callable
from typing import Any

from services.engine.batching.row_checks import check_rows
from services.engine.frozen_model import FrozenModel
from services.engine.model.forward import policy_forward
from services.runtime.context import RankContext
from services.runtime.ranks.sharding import shard_by_tokens
from services.runtime.role import Command, CommandProgress, Outcome
from splitppo.batch import Batch
from splitppo.config import Config
from splitppo.v1 import reference_pb2


class FrozenReference:
    """Behind ReferenceService: the initial policy, loaded on every rank together where this group hosts it.

    Its micro-batches are those of the section `actor`. `before` is called before it computes, on every rank.

    Raises:
        ValueError: the model cannot be loaded.
    """

    def __init__(self, context: RankContext, *, before: Callable[[], None] = lambda: None) -> None:
        self._context, self._before = context, before
        self._forward = policy_forward(context.config.rollout.temperature)
        self._model: FrozenModel | None = None
        if context.config.reference_host == context.role_name:
            self._model = FrozenModel(context.config.actor, device=context.device)

    def command(self) -> Command:
        """ComputeRefLogProbs; a group that does not host the reference says who does."""
        return Command(
            "ComputeRefLogProbs",
            reference_pb2.ComputeRefLogProbsRequest,
            self.compute_ref_log_probs,
            columns=("prompts", "responses"),
            check=self._check,
            prepare=self._prepare,
            shard=shard_by_tokens,
        )

    def compute_ref_log_probs(
        self, _request: reference_pb2.ComputeRefLogProbsRequest, batch: Batch, progress: CommandProgress
    ) -> Outcome:
        """Log-probs of the responses under the reference, at rollout.temperature."""
        assert self._model is not None
        self._before()
        computed = self._model.compute(batch, self._forward, outputs=("log_probs",), progress=progress)
        return Outcome(columns=Batch(batch.num_rows, {"ref_log_probs": computed["log_probs"]}))

    def _check(self, _request: Any) -> None:
        if self._model is None:
            raise ValueError(_why_not_here(self._context.config, self._context.role_name))

    def _prepare(self, _request: Any, batch: Batch) -> Batch:
        assert self._model is not None
        check_rows(batch, self._model.model)
        return batch


def _why_not_here(config: Config, role: str) -> str:
    """What the caller of a group without the reference is told."""
    if config.reference_host is None:
        return f"the {role} holds no reference: neither algorithm.use_kl_in_reward nor actor.use_kl_loss is set"
    return f"the {role} holds no reference: placement.reference is {config.reference_host}, call that group"
