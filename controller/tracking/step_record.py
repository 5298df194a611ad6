"""Collects spans, timings and metrics of one step while it runs, and computes the step's line of metrics.jsonl."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from controller.conversations.conversation import conversation_metrics
from controller.ppo.experience import Experience
from controller.ppo.scores import Scores
from controller.tracking.record.step_tokens import StepTokens
from controller.tracking.step_metrics import (
    balance_metrics,
    learning_metrics,
    length_metrics,
    overlap_metrics,
    reward_metrics,
    timing_metrics,
)
from controller.validation.result import ValidationResult
from controller.workers.clients import Traffic
from controller.workers.work import Work
from splitppo.batch import Batch, Column
from splitppo.clock import unix_s
from splitppo.config import Config
from splitppo.run_folder.metrics import check_declared
from splitppo.run_folder.spans import Span


@dataclass
class StepRecord(Work):
    """The record of one PPO step while the step runs. Times are unix seconds of the controller's clock.

    Attributes:
        started_s, ended_s: the step's own time, without validation and checkpoints; ended_s is None while it runs.
        epoch: the data epoch, from 0.
        scores, experience: there as soon as the step has them.
        update_columns: log-probs and entropies of the actor's own update, for the responses whose tokens are recorded.
        privileged: the tokens that the value model alone has read before each response; None if it has read none.
        versions: the version of the policy that sampled each token of the responses, if they may be of several.
        traffic: bytes moved for the step; before the step has ended, those moved before it.
    """

    started_s: float
    ended_s: float | None = None
    epoch: int = 0
    scores: Scores = field(init=False, repr=False)
    experience: Experience = field(init=False, repr=False)
    update_columns: Batch | None = None
    privileged: Column | None = None
    versions: Column | None = None
    validation: ValidationResult | None = None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def step_s(self) -> float:
        """The wall time of the step so far, in seconds."""
        return (unix_s() if self.ended_s is None else self.ended_s) - self.started_s

    @cached_property
    def learning(self) -> dict[str, float]:
        """The metrics critic/... of the step's experience; they are computed at the first access and then stored."""
        return learning_metrics(self.experience)

    @cached_property
    def tokens(self) -> StepTokens:
        """The tokens of the step's experience, with the numbers of the record that follow from them."""
        return StepTokens.of(self.experience)


def metrics_line(record: StepRecord, spans: Sequence[Span], config: Config) -> dict[str, float]:
    """Computes all metrics of a step whose updates have ended; `spans` has all spans since the step began."""
    experience = record.experience
    scores = record.scores
    prompt_lengths = experience.batch["prompts"].lengths
    response_lengths = experience.batch["responses"].lengths
    num_ranks = {role: config.services.of(role).num_processes for role in config.roles}
    takes_turns = config.rollout_shares_devices
    num_shared = min(num_ranks["critic"], num_ranks["rollout"]) if takes_turns else 0
    metrics = {
        **record.metrics,
        **experience.metrics,
        **record.learning,
        **conversation_metrics(
            scores.conversations,
            experience.batch.plain_columns.get("response_mask"),
            experience.batch.plain_columns.get("segments"),
        ),
        **length_metrics(prompt_lengths, response_lengths, scores.has_eos, config.data),
        **balance_metrics(prompt_lengths + response_lengths, num_ranks["actor"]),
        **reward_metrics(scores),
        **timing_metrics(
            record.timings_s,
            num_response_tokens=int(response_lengths.sum()),
            num_tokens=experience.num_tokens,
            step_s=record.step_s,
            num_ranks=sum(num_ranks.values()) - num_shared,
        ),
        **overlap_metrics(
            spans, step=record.step, started_s=record.started_s, step_s=record.step_s, takes_turns=takes_turns
        ),
        "rpc/bytes_sent": float(record.traffic.bytes_sent),
        "rpc/bytes_received": float(record.traffic.bytes_received),
        "training/global_step": float(record.step),
        "training/epoch": float(record.epoch),
    }
    if config.algorithm.phases:
        metrics["training/phase"] = float(config.algorithm.phase_number(record.step))
    if record.step_s > 0.0:
        metrics["rpc/time_fraction"] = record.traffic.transfer_s / record.step_s
    if record.validation is not None:
        metrics |= record.validation.metrics
    check_declared(metrics)
    return metrics
