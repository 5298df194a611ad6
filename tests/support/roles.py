"""Runs commands of roles on one rank, as a service does; requests and batches for these commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

from services.actor.role import ActorRole
from services.rollout.role import RolloutRole
from services.runtime.command import Command, CommandProgress, Outcome
from services.runtime.context import RankContext
from services.runtime.role import Role
from splitppo.batch import Batch
from splitppo.config.load import validate
from splitppo.config.section import RoleName
from splitppo.v1 import (
    actor_pb2,
    batch_pb2,
    conversation_pb2,
    reference_pb2,
    reward_model_pb2,
    rollout_pb2,
    teacher_pb2,
    worker_pb2,
)
from tests.support.engines import DEVICE
from tests.support.models import VOCABULARY
from tests.support.seeds import shifted

N_SAMPLES = 3


def context_of(role_name: RoleName, **sections: Any) -> RankContext:
    """Returns the context of the only rank of a group, on `DEVICE`; sections change the configuration."""
    data = {"train_files": "unused", "train_batch_size": 4, "max_response_length": 6}
    config = {"run": {"dir": "unused", "total_steps": 10}, "data": data, **sections}
    return RankContext(
        role_name=role_name,
        rank=0,
        world_size=1,
        device=DEVICE,
        control_group=cast(Any, None),
        config=validate(config, "test"),
    )


def build_actor(model: Path, *, weights: Path | str = "", **actor: Any) -> ActorRole:
    """Returns an actor with `N_SAMPLES` responses per prompt and two mini-batches; it hosts the reference, if any.

    `weights`: the folder in which it publishes them.
    """
    section = {"model": str(model), "lr": 1e-3, "ppo_mini_batch_size": 2, **actor}
    rollout = {"n": N_SAMPLES, "sync_dir": str(weights)}
    return ActorRole(context_of("actor", rollout=rollout, actor=section, placement={"reference": "actor"}))


def build_rollout(model: Path, weights: Path, **actor: Any) -> RolloutRole:
    """Returns a rollout role that samples with versions of weights in a folder; `actor`: keys of this section."""
    sections: dict[str, Any] = {
        "rollout": {"n": N_SAMPLES, "sync_dir": str(weights)},
        "actor": {"model": str(model), **actor},
        "services": {"rollout": {}},
    }
    return RolloutRole(context_of("rollout", **sections))


class RecordedProgress(CommandProgress):
    """The progress of a command, cancelled after so many reports or questions whether it is cancelled."""

    def __init__(self, *, reports: int | None = None, questions: int | None = None) -> None:
        self.parts: dict[int, Batch] = {}
        self.versions: set[int] = set()
        self.num_reports = self.num_questions = 0
        self._most_reports, self._most_questions = reports, questions

    def __call__(self, done: int, total: int, phase: str) -> None:
        assert 0 <= done <= total, (done, total)
        self.num_reports += 1

    def part_ready(self, part: int, columns: Batch, *, policy_version: int) -> None:
        assert part not in self.parts
        self.parts[part] = columns
        self.versions.add(policy_version)

    def is_cancelled(self) -> bool:
        self.num_questions += 1
        has_reported = self._most_reports is not None and self.num_reports >= self._most_reports
        has_asked = self._most_questions is not None and self.num_questions >= self._most_questions
        return has_reported or has_asked


def call(role: Role, method: str, request: Any, batch: Batch, report: RecordedProgress | None = None) -> Outcome:
    """Runs a command on one rank as a service does."""
    entry = command_of(role, method)
    entry.check(request)
    rows = entry.rows.prepare(request, rows_of(entry, batch))
    return entry.run(request, rows, report or RecordedProgress())


def rows_of(command: Command, batch: Batch) -> Batch:
    """Returns the columns of a batch that a command gets: its own, and the optional ones that are there."""
    optional = [name for name in command.rows.optional_columns if name in batch]
    return batch.select([*command.rows.columns, *optional])


def command_of(role: Role, method: str) -> Command:
    return next(entry for entry in role.commands() if entry.method == method)


def publish(role: Role, version: int, *, run_id: str = "run", keep_from: int = 0) -> str:
    """Publishes an actor's weights as those of a step; returns the sha256 of the manifest."""
    header = worker_pb2.CommandHeader(run_id=run_id, base_step=version)
    request = actor_pb2.PublishWeightsRequest(header=header, keep_from=keep_from)
    published = command_of(role, "PublishWeights").run(request, b"", RecordedProgress()).durable
    assert published is not None
    return published.result()


def sync(role: Role, version: int, manifest_sha256: str, *, run_id: str = "run", rank: int = 0) -> Outcome:
    """Lets a rollout role take over a published version, as a service does on a rank."""
    header = worker_pb2.CommandHeader(run_id=run_id)
    request = rollout_pb2.SyncWeightsRequest(header=header, version=version, manifest_sha256=manifest_sha256)
    entry = command_of(role, "SyncWeights")
    if rank == 0:
        entry.check(request)
    return entry.run(request, b"", RecordedProgress())


def generate_request(
    *,
    num_parts: int = 0,
    max_step_tokens: int = 0,
    base_step: int = 0,
    sleep_after: bool = False,
    conversation: conversation_pb2.Conversation | None = None,
    **changes: Any,
) -> actor_pb2.GenerateRequest:
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_response_length": 6, **changes}
    header = worker_pb2.CommandHeader(base_step=base_step)
    sampling = actor_pb2.SamplingParams(**params)
    return actor_pb2.GenerateRequest(
        header=header,
        sampling=sampling,
        num_parts=num_parts,
        max_step_tokens=max_step_tokens,
        sleep_after=sleep_after,
        conversation=conversation,
    )


def update_request(step: int = 1, **changes: Any) -> actor_pb2.ActorUpdateRequest:
    slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=step)
    return actor_pb2.ActorUpdateRequest(slot=slot, **changes)


def log_probs_request() -> actor_pb2.ComputeLogProbsRequest:
    return actor_pb2.ComputeLogProbsRequest()


def ref_log_probs(role: Role, batch: Batch, report: RecordedProgress | None = None) -> Batch:
    """Returns the column that ComputeRefLogProbs adds to a batch."""
    computed = call(role, "ComputeRefLogProbs", reference_pb2.ComputeRefLogProbsRequest(), batch, report).columns
    assert computed is not None
    return computed


def reward_scores(role: Role, batch: Batch, report: RecordedProgress | None = None) -> Batch:
    """Returns the column that ComputeRewardScores adds to a batch."""
    request = reward_model_pb2.ComputeRewardScoresRequest()
    computed = call(role, "ComputeRewardScores", request, batch, report).columns
    assert computed is not None
    return computed


def teacher_columns(role: Role, batch: Batch, *, num_ids: int = len(VOCABULARY), is_of_rank: bool = False) -> Batch:
    """Returns the columns that ComputeTeacherLogProbs adds to a batch, or to the rows of a rank, which may be none."""
    request = teacher_pb2.ComputeTeacherLogProbsRequest(num_ids=num_ids)
    if is_of_rank:
        entry = command_of(role, "ComputeTeacherLogProbs")
        computed = entry.run(request, rows_of(entry, batch), RecordedProgress()).columns
    else:
        computed = call(role, "ComputeTeacherLogProbs", request, batch).columns
    assert computed is not None
    return computed


def prompts(num_prompts: int = 4) -> Batch:
    rng = np.random.default_rng(shifted(0))
    rows = [rng.integers(3, len(VOCABULARY), rng.integers(2, 9)) for _ in range(num_prompts)]
    seeds = [[10 * row + sample for sample in range(N_SAMPLES)] for row in range(num_prompts)]
    return Batch.from_rows(prompts=rows, seeds=seeds)


def experience(role: ActorRole) -> Batch:
    """Returns a generated batch with advantages, for which the role itself makes every step."""
    made = call(role, "Generate", generate_request(), prompts()).columns
    assert made is not None
    rng = np.random.default_rng(shifted(1))
    return made.merge(Batch.from_rows(advantages=[rng.normal(size=length) for length in made["responses"].lengths]))
