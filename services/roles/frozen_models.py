"""Serves the frozen reference, reward model and teachers as commands of the worker group that `placement` names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from services.engine.batching.row_checks import check_rows, check_sequences
from services.engine.frozen_model import FrozenModel
from services.engine.model.adapters import adapters_off
from services.engine.model.forward import Forward, policy_forward, reward_forward
from services.engine.model.weights import Kind
from services.engine.train_engine import TrainEngine
from services.roles.sharding import shard_by_tokens
from services.runtime.command import Command, CommandProgress, Effect, Outcome, Rows, refused_command
from services.runtime.context import RankContext
from splitppo.batch import Batch, Column, concatenate
from splitppo.columns import spec_of
from splitppo.config import ComputedModelConfig
from splitppo.config.section import RoleName
from splitppo.images.columns import IMAGE_COLUMNS
from splitppo.v1 import reference_pb2, reward_model_pb2, teacher_pb2


class _BaseOfPolicy:
    """The reference of a policy with adapters: the same model, computing without them."""

    def __init__(self, policy: TrainEngine) -> None:
        self._policy = policy
        self.model = policy.model

    def compute(self, *arguments: Any, **options: Any) -> dict[str, Column]:
        with adapters_off(self.model):
            return self._policy.compute(*arguments, **options)


class FrozenModels:
    """A group's reference, reward model and teachers (some or none) with their commands; all ranks build it together.

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
        self._context = context
        self._trained = trained
        self._before = before
        self.num_parameters = 0
        self._commands = (
            self._compute_ref_log_probs(),
            self._compute_reward_scores(),
            self._compute_teacher_log_probs(),
        )

    def commands(self) -> Sequence[Command]:
        """Returns ComputeRefLogProbs, ComputeRewardScores and ComputeTeacherLogProbs, which all groups offer.

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
            self._load(config.reference_host, "policy", config.actor.changed("", offload), is_actor=True),
            refusal=self._refusal("reference", config.reference_host, unused),
            forward=lambda _: policy_forward(config.rollout.temperature),
            outputs={"ref_log_probs": "log_probs"},
        )

    def _compute_reward_scores(self) -> Command:
        """Makes the command for the reward model's scores: one per row, at the last token of `reward_tokens`."""
        config = self._context.config
        return self._command(
            "ComputeRewardScores",
            reward_model_pb2.ComputeRewardScoresRequest,
            self._load(config.reward_model_host, "reward", config.reward_model),
            refusal=self._refusal("reward model", config.reward_model_host, "reward_model.model is empty"),
            columns=("reward_tokens",),
            optional_columns=(),
            prepare=_last_token_apart,
            forward=lambda _: reward_forward,
            outputs={"rm_scores": "scores"},
        )

    def _compute_teacher_log_probs(self) -> Command:
        """Makes the command for the teachers' log-probs, at rollout.temperature; each row goes through its teacher.

        With teacher.signal top_k the log-probs are those of the teacher's `top_k` most likely tokens, too. `num_ids` of
        a request is the number of tokens of the tokenizer: only ids below it can be among these tokens.
        """
        config = self._context.config
        teacher = config.teacher
        # The column `teachers` has the index of each row's teacher in this list.
        models = self._load(config.teacher_host, "policy", *(teacher.of(folder) for folder in teacher.folders))
        top_k = teacher.top_k if teacher.signal == "top_k" else 0

        def forward(request: teacher_pb2.ComputeTeacherLogProbsRequest) -> Forward:
            return policy_forward(config.rollout.temperature, top_k=top_k, num_ids=request.num_ids)

        def check(request: teacher_pb2.ComputeTeacherLogProbsRequest) -> None:
            vocab_size = min(model.model.config.get_text_config().vocab_size for model in models)
            if top_k and not top_k <= request.num_ids <= vocab_size:
                raise ValueError(f"num_ids: expected {top_k} (teacher.top_k) to {vocab_size}, got {request.num_ids}")

        return self._command(
            "ComputeTeacherLogProbs",
            teacher_pb2.ComputeTeacherLogProbsRequest,
            models,
            refusal=self._refusal("teacher", config.teacher_host, "neither teacher.model nor teacher.models is set"),
            forward=forward,
            check=check,
            outputs={column: column.removeprefix("teacher_") for column in teacher.columns},
        )

    def _load(
        self, host: RoleName | None, kind: Kind, *configs: ComputedModelConfig, is_actor: bool = False
    ) -> Sequence[FrozenModel | _BaseOfPolicy]:
        """Loads frozen models if this group hosts them (`host` is this role); else returns none.

        `is_actor`: the model is that from which the policy starts, so that a policy with adapters has it already.
        """
        if host != self._context.role_name:
            return ()
        trained = self._trained
        if is_actor and trained is not None and trained.kind == kind and trained.config.lora_rank:
            return (_BaseOfPolicy(trained),)
        as_trained: dict[str, Any] = {}
        if trained is not None:
            as_trained = {"strategy": trained.strategy, "sequence_group": trained.sequence_group}
        limits = self._context.config.data.pixel_limits
        models = [
            FrozenModel(config, kind=kind, device=self._context.device, pixel_limits=limits, **as_trained)
            for config in configs
        ]
        self.num_parameters += sum(int(model.model.num_parameters()) for model in models)
        return models

    def _refusal(self, name: str, host: RoleName | None, unused: str) -> str:
        """Makes the error for a command whose model is not in this group; `unused`: why no group of the run has it."""
        key = f"placement.{name.replace(' ', '_')}"
        because = unused if host is None else f"{key} is {host}, call that group"
        return f"the {self._context.role_name} group holds no {name}: {because}"

    def _command(
        self,
        method: str,
        request_type: type[Message],
        models: Sequence[FrozenModel | _BaseOfPolicy],
        *,
        refusal: str,
        forward: Callable[[Any], Forward],
        outputs: Mapping[str, str],
        columns: Sequence[str] = ("prompts", "responses"),
        optional_columns: Sequence[str] = ("segments", *IMAGE_COLUMNS),
        prepare: Callable[[Batch, Any], Batch] = check_rows,
        check: Callable[[Any], None] = lambda _: None,
    ) -> Command:
        """Makes a command that runs `forward` of a request on the rows from `prepare`.

        `outputs` has for each column of the result the name of its output; each row goes through its own model.
        """
        if not models:
            return refused_command(method, request_type, refusal)
        hosted = _HostedModels(models, self._before, prepare, forward, outputs)
        rows = Rows(
            columns=columns,
            optional_columns=(*optional_columns, *(("teachers",) if len(models) > 1 else ())),
            prepare=hosted.prepare_rows,
            shard=shard_by_tokens,
        )
        return Command(method, request_type, Effect.WRITES_SLOT, hosted.compute, rows, check=check)


@dataclass(frozen=True)
class _HostedModels:
    """The frozen models of one command; each row goes through its own model, by the column `teachers`.

    Attributes:
        before: called on every rank before they compute.
        prepare: (rows, model) -> rows; checks that the model can take them.
        forward: makes the forward pass of a request.
        outputs: for each column of the result, the name of the output of `forward`.
    """

    models: Sequence[FrozenModel | _BaseOfPolicy]
    before: Callable[[], None]
    prepare: Callable[[Batch, Any], Batch]
    forward: Callable[[Any], Forward]
    outputs: Mapping[str, str]

    def prepare_rows(self, _request: Any, batch: Batch) -> Batch:
        """Checks that every row has a model, and that every model can take all rows; returns the prepared rows."""
        _rows_of_models(batch, len(self.models))
        prepared = batch
        for model in self.models:
            prepared = self.prepare(batch, model.model)
        return prepared

    def compute(self, request: Any, batch: Batch, progress: CommandProgress) -> Outcome:
        """Computes the columns of the result for this rank's rows."""
        self.before()
        if len(self.models) == 1:
            return Outcome(columns=self._compute_with(self.models[0], request, batch, progress))
        rows_of_models = _rows_of_models(batch, len(self.models))
        computed = [
            self._compute_with(model, request, batch.take(rows), progress)
            for model, rows in zip(self.models, rows_of_models, strict=True)
        ]
        in_order_of_rows = np.argsort(np.concatenate(rows_of_models))
        return Outcome(columns=concatenate(computed).take(in_order_of_rows))

    def _compute_with(
        self, model: FrozenModel | _BaseOfPolicy, request: Any, rows: Batch, progress: CommandProgress
    ) -> Batch:
        """Computes the columns of some rows with one of the models, in the dtypes of the columns."""
        computed = model.compute(rows, self.forward(request), outputs=[*self.outputs.values()], progress=progress)
        columns = {column: _typed(column, computed[output]) for column, output in self.outputs.items()}
        return Batch(rows.num_rows, columns)


def _typed(column: str, values: Column) -> Column:
    """Returns a column with the dtype of its name, which a rank without rows does not know."""
    return Column(values.values.astype(spec_of(column).dtype, copy=False), values.lengths)


def _rows_of_models(batch: Batch, num_models: int) -> list[NDArray[np.int64]]:
    """Returns the indices of the rows of each model, by the column `teachers`; without it the first model has all.

    Raises:
        ValueError: there is no model of a row's number.
    """
    if "teachers" not in batch:
        return [np.arange(batch.num_rows), *[np.empty(0, np.int64)] * (num_models - 1)]
    own = batch["teachers"]
    if not ((own.values >= 0) & (own.values < num_models)).all():
        raise ValueError(f"column 'teachers': expected one number from 0 to {num_models - 1} for each row")
    return [np.flatnonzero(own.values == number) for number in range(num_models)]


def _last_token_apart(batch: Batch, model: Any) -> Batch:
    """Splits each row's `reward_tokens` into a prompt and a response (the last token): only responses get scores."""
    check_sequences(batch, "reward_tokens", model)
    tokens = batch["reward_tokens"]
    is_last = np.zeros(len(tokens.values), np.bool_)
    is_last[tokens.offsets[1:] - 1] = True
    prompts = Column(tokens.values[~is_last], tokens.lengths - np.int32(1))
    responses = Column(tokens.values[is_last], np.ones_like(tokens.lengths))
    return Batch(batch.num_rows, {"prompts": prompts, "responses": responses})
