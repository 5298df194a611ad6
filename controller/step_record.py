"""The record of one step while it runs, and the metrics line that it becomes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from controller.clients import CommandReply, Traffic
from controller.evaluation import ValidationResult
from controller.experience import Experience
from controller.metrics import check_declared
from controller.scoring import Verdict
from controller.step_metrics import (
    balance_metrics,
    learning_metrics,
    length_metrics,
    overlap_metrics,
    reward_extra_metrics,
    timing_metrics,
)
from controller.trace import Span
from splitppo.config import Config


@dataclass
class StepRecord:
    """The record of one step while it runs. Times are unix seconds of the controller's clock.

    Attributes:
        step: the step.
        started_s, ended_s: the step's own time, without validation and checkpoints; not ended: still running.
        metrics: what the services reported.
        timings_s: seconds per phase, as the controller saw them, or an engine for what is its own.
        spans: who worked when.
        verdict, experience, validation: what the step produced so far.
        traffic_before, traffic: bytes moved before the step, and for it.
    """

    step: int
    started_s: float
    ended_s: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    timings_s: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    verdict: Verdict | None = None
    experience: Experience | None = None
    validation: ValidationResult | None = None
    traffic_before: Traffic = field(default_factory=Traffic)
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def step_s(self) -> float:
        """Wall time of the step so far."""
        return (time.time() if self.ended_s is None else self.ended_s) - self.started_s

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time of a block to the timing of that name."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.add_time(name, time.perf_counter() - started_s)

    def add_time(self, name: str, seconds: float) -> None:
        """Adds to the timing of that name."""
        self.timings_s[name] = self.timings_s.get(name, 0.0) + seconds

    @contextmanager
    def span(self, pool: str, name: str) -> Iterator[None]:
        """Records a block of the controller's own work, or of its reward workers, on the timeline."""
        started_s = time.time()
        yield
        self.spans.append(Span(pool, name, self.step, started_s, time.time()))

    def add_reply(self, pool: str, name: str, reply: CommandReply) -> None:
        """Takes over what an engine did for this step: its span, its metrics, and the times that it took itself."""
        self.spans.append(reply.span(pool, name, self.step))
        self.metrics |= {metric: value for metric, value in reply.metrics.items() if not metric.startswith("timing_s/")}
        for timing, seconds in reply.timings_s.items():
            self.add_time(timing, seconds)


def metrics_line(record: StepRecord, spans: Sequence[Span], config: Config, *, epoch: int) -> dict[str, float]:
    """All metrics of a step whose updates are done.

    Args:
        record: the closed record.
        spans: who worked when, at least since the step began.
        config: of the run.
        epoch: passes over the training prompts begun before the step.
    """
    experience, verdict = record.experience, record.verdict
    assert experience is not None
    assert verdict is not None
    batch, result = experience.batch, verdict.result
    prompt_lengths, response_lengths = batch["prompts"].lengths, batch["responses"].lengths
    num_ranks = config.services.actor.num_processes
    metrics = {
        **record.metrics,
        **experience.metrics,
        **learning_metrics(
            experience.scores,
            experience.rewards,
            experience.padded("advantages"),
            experience.padded("returns"),
            experience.mask,
            learned_BT=experience.learned,
            values_BT=experience.padded("values") if "values" in batch else None,
        ),
        **length_metrics(
            prompt_lengths,
            response_lengths,
            verdict.ended,
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.data.max_response_length,
        ),
        **balance_metrics(prompt_lengths + response_lengths, num_ranks),
        **reward_extra_metrics(result.extra),
        "reward/num_timeouts": float(result.num_timeouts),
        "reward/num_crashes": float(result.num_crashes),
        "reward/num_errors": float(result.num_errors),
        **timing_metrics(
            record.timings_s,
            num_response_tokens=int(response_lengths.sum()),
            num_tokens=experience.num_tokens,
            step_s=record.step_s,
            num_ranks=num_ranks + (config.services.critic.num_processes if config.uses_critic else 0),
        ),
        **overlap_metrics(
            spans, step=record.step, started_s=record.started_s, finished_s=record.started_s + record.step_s
        ),
        "rpc/bytes_sent": float(record.traffic.bytes_sent),
        "rpc/bytes_received": float(record.traffic.bytes_received),
        "training/global_step": float(record.step),
        "training/epoch": float(epoch),
    }
    if record.step_s > 0.0:
        metrics["rpc/time_fraction"] = record.traffic.transfer_s / record.step_s
    if experience.kl is not None:
        metrics["actor/reward_kl_penalty"] = experience.kl
        metrics["actor/reward_kl_penalty_coeff"] = experience.kl_coef
    if record.validation is not None:
        metrics |= record.validation.metrics
    check_declared(metrics)
    return metrics
