"""Clients of worker groups, and reward functions, that compute nothing: a command sleeps as long as it would take.

A row is a response of one token. Its prompt, one token too, is the number of the row in the step.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from controller.commands.planner.part_shares import part_shares
from controller.commands.planner.virtual_time import Devices
from controller.conversations.conversation import Conversation
from controller.data.prompts import PromptBatch
from controller.data.tokenizer import Tokenizer
from controller.ppo.scores import Scores, objects
from controller.scoring.scorer import Scorer
from controller.workers.clients import (
    ActorClient,
    Caller,
    CriticClient,
    RewardClient,
    RolloutClient,
    Traffic,
    WorkerClient,
)
from controller.workers.command import CommandReply, EventCallback
from rewards.source import FailureLimit
from splitppo.batch import Batch, Column
from splitppo.v1 import worker_pb2
from splitppo.v1.batch_pb2 import SLOT_KIND_EVALUATION, Slot

SOURCE = "planned"  # the data source of all rows

# Rows are sent in less than a microsecond, since the seconds of a transfer are counted elsewhere. But fewer bytes
# arrive earlier: so commands queue in the order in which they do in a run.
_BYTES_PER_S = 1e10
# Computations by the phase of a step that they are; an update is the phase update_ROLE.
_PHASES = {
    "ComputeLogProbs": "old_log_prob",
    "ComputeRefLogProbs": "ref",
    "ComputeTeacherLogProbs": "teacher",
    "ComputeRewardScores": "reward_model",
    "ComputeValues": "values",
    "PublishWeights": "publish",
    "SyncWeights": "sync",
}


class StepWork:
    """The seconds of work of each phase of a step, and the part of them that each row takes.

    Attributes:
        phase_s: seconds by phase; an absent phase takes 0 s.
        response_share: the share of response tokens in all tokens of a step.
        rollout_share: the share of the responses that a rollout group samples.
    """

    def __init__(
        self, phase_s: Mapping[str, float], *, response_share: float, rollout_share: float, num_rows: int
    ) -> None:
        self.phase_s = phase_s
        self.response_share = response_share
        self.rollout_share = rollout_share
        self._parts = np.zeros(num_rows)  # of the work of the step, by row

    def seconds(self, phase: str) -> float:
        """Returns the seconds of a phase for all rows."""
        return self.phase_s.get(phase, 0.0)

    def seconds_of(self, rows: Batch, phase: str) -> float:
        """Returns the seconds of a phase for some rows of a step, which have been sampled."""
        return self.seconds(phase) * float(self._parts[rows["prompts"].values].sum())

    def divide(self, role: str, rows: Batch, num_parts: int) -> list[NDArray[np.int64]]:
        """Divides the rows that a group samples into parts, which end one after the other; returns their places."""
        of_group = self.rollout_share if role == "rollout" else 1.0 - self.rollout_share
        places = np.array_split(np.arange(rows.num_rows), num_parts)
        tokens = part_shares(num_parts, self.response_share)
        for part, share in zip(places, tokens, strict=True):
            self._parts[rows["prompts"].values[part]] = of_group * share / len(part)
        return places


class _SleepingClient(WorkerClient):
    """A client whose group stores the rows that it is sent, and sleeps for each command in a pool of devices."""

    def __init__(self, pool: str, devices: Devices, work: StepWork) -> None:  # not the client's: there is no channel
        self.committed_step = 0
        self.traffic = Traffic()
        self._pool = pool
        self._devices = devices
        self._work = work
        self._rows: dict[bytes, Batch] = {}  # by slot
        self._caller = Caller("planned", 1)
        self._num_loads = 0
        no_service: Any = None  # none is called
        self._worker = no_service
        self._reference = no_service
        self._reward_model = no_service
        self._teacher = no_service

    async def put_batch(self, slot: Slot, batch: Batch) -> None:
        """Stores rows or columns in a slot."""
        await asyncio.sleep(batch.num_bytes / _BYTES_PER_S)
        name = slot.SerializeToString()
        self._rows[name] = self._rows[name].merge(batch) if name in self._rows else batch

    async def get_batch(self, slot: Slot, columns: Sequence[str]) -> Batch:
        """Returns columns of a slot; a column that nobody has stored is 0 everywhere, since nothing is computed."""
        rows = self._stored(slot)
        zeros = _one_each(np.zeros(rows.num_rows, np.float32))
        return Batch(rows.num_rows, {name: rows.columns.get(name, zeros) for name in columns})

    async def get_status(self) -> worker_pb2.GetStatusResponse:
        """Returns the step whose weights the group has."""
        return worker_pb2.GetStatusResponse(committed_step=self.committed_step)

    async def _command(
        self,
        method: str,
        request: Any,
        base_step: int,  # noqa: ARG002 - of the client
        *,
        step: int | None = None,  # noqa: ARG002
        service: Any = None,  # noqa: ARG002
        on_event: EventCallback = lambda _: None,
    ) -> CommandReply:
        """Stands in for a command to a group: sleeps as long as it would take, keeps rows and version, and replies."""
        if method == "Generate":
            await self._generate(request, on_event)
        elif method.startswith("Compute"):
            await self._compute(_PHASES[method], request.slot)
        elif method == "Update":
            await self._devices.work(self._pool, self._work.seconds(f"update_{self.role}"))
            self._commit(request.slot.step)
        else:
            await self._devices.work(self._pool, self._work.seconds(_PHASES[method]))
            if method == "SyncWeights":
                self.committed_step = request.version
        version = self.committed_step
        result = worker_pb2.CommandResult(committed_step=version, policy_version=version, manifest_sha256="planned")
        return CommandReply(result, 0.0, 0.0)

    async def _compute(self, phase: str, slot: Slot) -> None:
        seconds = 0.0 if _is_probe(slot) else self._work.seconds_of(self._stored(slot), phase)
        await self._devices.work(self._pool, seconds)

    def _commit(self, step: int) -> None:
        """Makes `step` the one whose weights the group has, and forgets the rows that it has learned from."""
        self.committed_step = step
        self._rows = {name: rows for name, rows in self._rows.items() if Slot.FromString(name).step > step}

    async def _generate(self, request: Any, on_event: EventCallback) -> None:
        """Samples the rows of a slot, in parts that can be fetched one after the other."""
        slot = request.slot
        asked = self._stored(slot)
        responses = _one_each(np.zeros(asked.num_rows, np.int32))
        log_probs = _one_each(np.zeros(asked.num_rows, np.float32))
        rows = asked.merge(Batch(asked.num_rows, {"responses": responses, "rollout_log_probs": log_probs}))
        num_parts = request.num_parts or 1
        if _is_probe(slot):
            self._put(slot, rows)
            return
        places = self._work.divide(self.role, rows, num_parts)

        def end_part(part: int) -> None:
            """Stores the rows of a part (the first is 1), with their places in the slot, and reports it as ready."""
            own_places = places[part - 1]
            column = Batch(len(own_places), {"places": _one_each(own_places.astype(np.int32))})
            self._put(Slot(kind=slot.kind, step=slot.step, part=part), rows.take(own_places).merge(column))
            ready = worker_pb2.PartReady(part=part, policy_version=self.committed_step)
            on_event(worker_pb2.CommandEvent(part=ready))

        seconds = self._work.seconds("gen_rollout" if self.role == "rollout" else "gen")
        pieces_s = [seconds * share for share in part_shares(num_parts)]
        if num_parts == 1:
            self._put(slot, rows)
            await self._devices.work(self._pool, *pieces_s)
        else:
            await self._devices.work(self._pool, *pieces_s, on_piece=end_part)
            self._put(slot, rows)

    def _stored(self, slot: Slot) -> Batch:
        return self._rows[slot.SerializeToString()]

    def _put(self, slot: Slot, rows: Batch) -> None:
        self._rows[slot.SerializeToString()] = rows


def _is_probe(slot: Slot) -> bool:
    """Returns True for the few rows that compare new weights: their time is counted as a part of other phases."""
    return slot.kind == SLOT_KIND_EVALUATION


def _one_each(values: NDArray[Any]) -> Column:
    return Column(values, np.ones(len(values), np.int32))


class SleepingActor(_SleepingClient, ActorClient):
    """The client of an actor's group that sleeps."""


class SleepingCritic(_SleepingClient, CriticClient):
    """The client of a critic's group that sleeps."""


class SleepingReward(_SleepingClient, RewardClient):
    """The client of a reward group that sleeps."""


class SleepingRollout(_SleepingClient, RolloutClient):
    """The client of a rollout group that sleeps."""


class SleepingScorer(Scorer):
    """Reward functions that sleep, and give every response the score 0."""

    def __init__(self, work: StepWork) -> None:  # not the scorer's: nothing is decoded
        self.tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"0": 0, "1": 1}, "0")))
        self._work = work

    @property
    def data_sources(self) -> frozenset[str]:
        """The one data source."""
        return frozenset({SOURCE})

    @property
    def max_reward_length(self) -> int | None:
        """None: no row is cut."""
        return None

    async def reward_rows(
        self,
        prompts: PromptBatch,  # noqa: ARG002 - of Scorer
        rollouts: Batch,
        conversations: Sequence[Conversation] = (),  # noqa: ARG002
    ) -> Batch:
        """Returns the responses as the rows of the reward model, which keep their numbers."""
        return Batch(rollouts.num_rows, {"reward_tokens": rollouts["responses"], "prompts": rollouts["prompts"]})

    async def score(
        self,
        prompts: PromptBatch,
        rollouts: Batch,
        conversations: Sequence[Conversation] = (),  # noqa: ARG002 - of Scorer
        *,
        num_examine: int,  # noqa: ARG002
        asks_functions: bool = True,  # noqa: ARG002
        limit: FailureLimit | None = None,  # noqa: ARG002
    ) -> Scores:
        """Sleeps for the scores of some responses, beside the worker groups."""
        await asyncio.sleep(self._work.seconds_of(rollouts, "score"))
        num_rows = rollouts.num_rows
        zeros = np.zeros(num_rows, np.float32)
        nothing = Column(np.zeros(0, np.float32), np.zeros(num_rows, np.int32))
        unknown = objects([None] * num_rows)
        return Scores(
            scores=zeros,
            rule_scores=zeros,
            model_scores=None,
            token_scores=nothing,
            rule_token_scores=nothing,
            has_eos=np.ones(num_rows, np.bool_),
            has_stopped=np.zeros(num_rows, np.bool_),
            is_truncated=np.zeros(num_rows, np.bool_),
            data_sources=objects([SOURCE] * num_rows),
            prompt_indices=prompts.row_indices,
            places=unknown,
            failures=unknown,
            messages=unknown,
            extra=objects([{}] * num_rows),
            conversations=unknown,
            texts=unknown,
        )
