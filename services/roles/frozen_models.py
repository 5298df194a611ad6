"""Serves the frozen reference and reward model as commands of the worker group that `placement` names."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message

from services.engine.batching.row_checks import check_rows, check_sequences
from services.engine.frozen_model import FrozenModel
from services.engine.model.adapters import adapters_off
from services.engine.model.forward import Forward, policy_forward, reward_forward
from services.engine.model.weights import Kind
from services.engine.train_engine import TrainEngine
from services.runtime.context import RankContext
from services.runtime.role import Command, CommandProgress, Outcome, refused_command
from splitppo.batch import Batch, Column
from splitppo.config import ComputedModelConfig
from splitppo.config.section import RoleName
from splitppo.v1 import reference_pb2, reward_model_pb2


class _BaseOfPolicy:
    """The reference of a policy with adapters: the same model, computing without them."""

    def __init__(self, policy: TrainEngine) -> None:
        self._policy, self.model = policy, policy.model

    def compute(self, *arguments: Any, **options: Any) -> dict[str, Column]:
        with adapters_off(self.model):
            return self._policy.compute(*arguments, **options)


class FrozenModels:
    """A group's reference and reward model (none, one or both) with their commands; all ranks build it together.

    Args:
        trained: the model in training of this group, None if it has none. The frozen models lie on the ranks as it
            does. The frozen base of a policy with adapters is the reference.
        before: a function that is called on every rank before a frozen model computes.

    Attributes:
        num_parameters: number of parameters of the frozen models in this group.

    Raises:
        ValueError: a model cannot be loaded.
    """

    def __init__(
        self, context: RankContext, trained: TrainEngine | None = None, *, before: Callable[[], None] = lambda: None
    ) -> None:
        self._context, self._trained, self._before = context, trained, before
        self.num_parameters = 0
        self._commands = (self._compute_ref_log_probs(), self._compute_reward_scores())

    def commands(self) -> Sequence[Command]:
        """Returns the commands ComputeRefLogProbs and ComputeRewardScores, which the groups of all roles offer.

        If another group hosts the model, the command raises ValueError and names that group.
        """
        return self._commands

    def _compute_ref_log_probs(self) -> Command:
        """Makes the command for reference log-probs, at rollout.temperature, with the actor's micro-batch limits."""
        config = self._context.config
        offload = {"param_offload": config.placement.reference_param_offload}
        unused = "neither algorithm.use_kl_in_reward nor actor.use_kl_loss is set"
        return self._command(
            "ComputeRefLogProbs",
            reference_pb2.ComputeRefLogProbsRequest,
            self._load(config.reference_host, config.actor.changed("", offload), "policy"),
            refusal=self._refusal("reference", config.reference_host, unused),
            columns=("prompts", "responses"),
            prepare=check_rows,
            forward=policy_forward(config.rollout.temperature),
            output="log_probs",
            column="ref_log_probs",
        )

    def _compute_reward_scores(self) -> Command:
        """Makes the command for the reward model's scores: one per row, at the last token of `reward_tokens`."""
        config = self._context.config
        return self._command(
            "ComputeRewardScores",
            reward_model_pb2.ComputeRewardScoresRequest,
            self._load(config.reward_model_host, config.reward_model, "reward"),
            refusal=self._refusal("reward model", config.reward_model_host, "reward_model.model is empty"),
            columns=("reward_tokens",),
            prepare=_last_token_apart,
            forward=reward_forward,
            output="scores",
            column="rm_scores",
        )

    def _load(
        self, host: RoleName | None, config: ComputedModelConfig, kind: Kind
    ) -> FrozenModel | _BaseOfPolicy | None:
        """Loads a frozen model if this group hosts that model (`host` is this role); else returns None."""
        if host != self._context.role_name:
            return None
        trained = self._trained
        if trained is not None and trained.kind == kind and trained.config.lora_rank:
            return _BaseOfPolicy(trained)
        strategy = None if trained is None else trained.strategy
        model = FrozenModel(config, kind=kind, device=self._context.device, strategy=strategy)
        self.num_parameters += int(model.model.num_parameters())
        return model

    def _refusal(self, name: str, host: RoleName | None, unused: str) -> str:
        """Makes the error for a command whose model is not in this group; `unused`: why no group of the run has it."""
        key = f"placement.{name.replace(' ', '_')}"
        because = unused if host is None else f"{key} is {host}, call that group"
        return f"the {self._context.role_name} group holds no {name}: {because}"

    def _command(
        self,
        method: str,
        request_type: type[Message],
        model: FrozenModel | _BaseOfPolicy | None,
        *,
        refusal: str,
        columns: Sequence[str],
        prepare: Callable[[Batch, Any], Batch],
        forward: Forward,
        output: str,
        column: str,
    ) -> Command:
        """Makes a command that runs `forward` on the rows from `prepare` and stores one output as `column`."""
        if model is None:
            return refused_command(method, request_type, refusal)

        def prepare_rows(_request: Any, batch: Batch) -> Batch:
            return prepare(batch, model.model)

        def compute(_request: Any, batch: Batch, progress: CommandProgress) -> Outcome:
            self._before()
            computed = model.compute(batch, forward, outputs=(output,), progress=progress)
            return Outcome(columns=Batch(batch.num_rows, {column: computed[output]}))

        return Command(method, request_type, compute, columns=columns, prepare=prepare_rows)


def _last_token_apart(batch: Batch, model: Any) -> Batch:
    """Splits each row's `reward_tokens` into a prompt and a response (the last token): only responses get scores."""
    check_sequences(batch, "reward_tokens", model)
    tokens = batch["reward_tokens"]
    is_last = np.zeros(len(tokens.values), np.bool_)
    is_last[tokens.offsets[1:] - 1] = True
    prompts = Column(tokens.values[~is_last], tokens.lengths - np.int32(1))
    responses = Column(tokens.values[is_last], np.ones_like(tokens.lengths))
    return Batch(batch.num_rows, {"prompts": prompts, "responses": responses})
