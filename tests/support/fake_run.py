"""A trainer whose services are fakes without processes, and the files that it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.data.prompts import PromptBatch
from controller.run.checkpoint_store import CheckpointStore
from controller.run.checkpoint_writer import CheckpointWriter
from controller.run.state import RunState
from controller.sampling.stream import SamplingGroups
from controller.sampling.versions import raise_error
from controller.step.look_ahead import step_rollouts
from controller.tracking.recorder import Recorder
from controller.tracking.sinks.step_files import StepFiles
from controller.trainer import Trainer
from controller.validation.evaluation import Evaluator
from controller.workers.worker_groups import Workers
from splitppo.config import Config
from splitppo.run_folder.step_file import read_metrics
from tests.support.call_log import CallLog
from tests.support.fake_rollout import FakeRollout
from tests.support.fake_services import (
    FakeActor,
    FakeCritic,
    FakeReward,
    FakeScorer,
    make_config,
    make_prompts,
    make_table,
    plain_display,
)


@dataclass
class FakeRun:
    """A trainer with its parts and its metrics."""

    config: Config
    log: CallLog
    actor: FakeActor
    critic: FakeCritic
    reward: FakeReward
    scorer: FakeScorer
    store: CheckpointStore
    recorder: Recorder
    trainer: Trainer

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, parsed."""
        return read_metrics(self.config.run.dir / "metrics.jsonl")


def make_run(
    run_dir: Path,
    *,
    at_step: int = 0,
    validates: bool = False,
    rollouts: bytes | None = None,
    actor: Callable[[CallLog], FakeActor] = FakeActor,
    critic: Callable[[CallLog], FakeCritic] = FakeCritic,
    table: PromptBatch | None = None,
    **changes: Any,
) -> FakeRun:
    """Returns a run after `at_step` steps, with stored `rollouts` of the next step.

    `changes` as for `make_config`; `actor` and `critic` make the clients; `table` has the training prompts.
    """
    config = make_config(run_dir, **changes)
    log = CallLog()
    policy, value, reward, scorer = actor(log), critic(log), FakeReward(log), FakeScorer(log)
    policy.committed_step = value.committed_step = at_step
    prompts = make_prompts(config, table)
    rollout = FakeRollout(log) if config.services.rollout else None
    workers = Workers.of(
        config, policy, value if config.uses_critic else None, reward if "reward" in config.roles else None, rollout
    )
    sampling = SamplingGroups.of(config, workers, restart=rollout.restart if rollout else raise_error)
    value.finds_top_tokens = reward.finds_top_tokens = policy.finds_top_tokens = config.teacher.signal == "top_k"
    recorder = Recorder(config, [StepFiles(config, run_dir).receive, plain_display().receive])
    recorder.restart_at(at_step, workers.clients, None)
    store = CheckpointStore(run_dir / "checkpoints")
    trainer = Trainer(
        config,
        workers,
        sampling,
        step_rollouts(config, prompts, rollouts),
        scorer,
        Evaluator(config, sampling, make_table(2) if validates else None, scorer),
        CheckpointWriter(store, workers.trained, config, on_saved=recorder.add_spans, on_commit=recorder.release),
        recorder,
        RunState.initial(config).at_step(at_step),
    )
    return FakeRun(config, log, policy, value, reward, scorer, store, recorder, trainer)
