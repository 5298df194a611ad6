"""The models that are not trained, reference and reward model: each a command of the group that `placement` names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import Message

from services.engine.batching.row_checks import check_rows, check_sequences
from services.engine.frozen_model import FrozenModel
from services.engine.model.forward import Forward, policy_forward, reward_forward
from services.engine.model.weights import Kind
from services.runtime.context import RankContext
from services.runtime.ranks.sharding import shard_by_tokens
from services.runtime.role import Command, CommandProgress, Outcome
from splitppo.batch import Batch, Column
from splitppo.config import ComputedModelConfig
from splitppo.config.section import RoleName
from splitppo.v1 import reference_pb2, reward_model_pb2


class FrozenModels:
    """Those that a group hosts, loaded, on every rank together.

    Args:
        before: called before any of them computes, on every rank.

    Attributes:
        commands: ComputeRefLogProbs and ComputeRewardScores, as a group of any role offers them: where the model is
            elsewhere, the command says where.
        num_parameters: of the models that are here.

    Raises:
        ValueError: a model cannot be loaded.
    """

    def __init__(self, context: RankContext, *, before: Callable[[], None] = lambda: None) -> None:
        self.num_parameters = 0
        self.commands: list[Command] = []
        for frozen in (_reference(context), _reward_model(context)):
            model = None
            if frozen.host == context.role_name:
                model = FrozenModel(frozen.config, kind=frozen.kind, device=context.device)
                self.num_parameters += int(model.model.num_parameters())
            self.commands.append(_command(frozen, model, context.role_name, before))


@dataclass(frozen=True)
class _Frozen:
    """A frozen model as a command.

    Attributes:
        name: in sentences, and in `placement` with underscores.
        host: the role whose group has it; None: `absent` says why the run has none.
        config, kind: of the model.
        columns: of the slot, which `prepare` checks and turns into the rows that the engine computes.
        output: of `forward`; it becomes the slot's column `column`.
    """

    name: str
    host: RoleName | None
    absent: str
    config: ComputedModelConfig
    kind: Kind
    method: str
    request_type: type[Message]
    columns: Sequence[str]
    prepare: Callable[[Batch, Any], Batch]
    forward: Forward
    output: str
    column: str

    def why_not_in(self, role: RoleName) -> str:
        """What the caller of another group is told."""
        key = f"placement.{self.name.replace(' ', '_')}"
        because = self.absent if self.host is None else f"{key} is {self.host}, call that group"
        return f"the {role} group holds no {self.name}: {because}"


def _reference(context: RankContext) -> _Frozen:
    """The initial policy: log-probs of responses at rollout.temperature, in micro-batches of the section `actor`."""
    config = context.config
    return _Frozen(
        name="reference",
        host=config.reference_host,
        absent="neither algorithm.use_kl_in_reward nor actor.use_kl_loss is set",
        config=config.actor,
        kind="policy",
        method="ComputeRefLogProbs",
        request_type=reference_pb2.ComputeRefLogProbsRequest,
        columns=("prompts", "responses"),
        prepare=_checked,
        forward=policy_forward(config.rollout.temperature),
        output="log_probs",
        column="ref_log_probs",
    )


def _reward_model(context: RankContext) -> _Frozen:
    """A sequence classifier: its score at the last of a row's `reward_tokens`, which need nothing beside them."""
    config = context.config
    return _Frozen(
        name="reward model",
        host=config.reward_model_host,
        absent="reward_model.model is empty",
        config=config.reward_model,
        kind="reward",
        method="ComputeRewardScores",
        request_type=reward_model_pb2.ComputeRewardScoresRequest,
        columns=("reward_tokens",),
        prepare=_last_token_apart,
        forward=reward_forward,
        output="scores",
        column="rm_scores",
    )


def _command(frozen: _Frozen, model: FrozenModel | None, role: RoleName, before: Callable[[], None]) -> Command:
    def check(_request: Any) -> None:
        if model is None:
            raise ValueError(frozen.why_not_in(role))

    def prepare(_request: Any, batch: Batch) -> Batch:
        assert model is not None
        return frozen.prepare(batch, model.model)

    def compute(_request: Any, batch: Batch, progress: CommandProgress) -> Outcome:
        assert model is not None
        before()
        computed: Mapping[str, Column] = model.compute(
            batch, frozen.forward, outputs=(frozen.output,), progress=progress
        )
        return Outcome(columns=Batch(batch.num_rows, {frozen.column: computed[frozen.output]}))

    return Command(
        frozen.method,
        frozen.request_type,
        compute,
        columns=frozen.columns,
        check=check,
        prepare=prepare,
        shard=shard_by_tokens,
    )


def _checked(batch: Batch, model: Any) -> Batch:
    check_rows(batch, model)
    return batch


def _last_token_apart(batch: Batch, model: Any) -> Batch:
    """Rows as the engine computes them: the last token is the response, what is before it the prompt."""
    check_sequences(batch, "reward_tokens", model)
    tokens = batch["reward_tokens"]
    is_last = np.zeros(len(tokens.values), np.bool_)
    is_last[tokens.offsets[1:] - 1] = True
    prompts = Column(tokens.values[~is_last], tokens.lengths - np.int32(1))
    responses = Column(tokens.values[is_last], np.ones_like(tokens.lengths))
    return Batch(batch.num_rows, {"prompts": prompts, "responses": responses})
