"""Validation: the policy answers held-out prompts, the rewards judge the answers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.clients import ActorClient, CommandReply
from controller.data import PromptBatch, PromptTable
from controller.scoring import Scorer, Verdict
from controller.summary import Accuracy
from controller.trace import Span
from controller.validation_metrics import Outcome, accuracy_by_source, validation_metrics
from splitppo.batch import Batch
from splitppo.config import Config
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_EVALUATION, Slot


@dataclass(frozen=True)
class ValidationResult:
    """One validation.

    Attributes:
        accuracy: overall and per data source.
        metrics: val-core/... and val-aux/...
        verdicts: what was generated and judged, in parts.
        timings_s: seconds, of the whole under "testing"; of it what the engine says, e.g. "update_weights".
        spans: the actor's and the scorers' parts of it.
    """

    accuracy: Accuracy
    metrics: Mapping[str, float]
    verdicts: Sequence[Verdict]
    timings_s: Mapping[str, float]
    spans: Sequence[Span] = ()


class Evaluator:
    """Validates the policy that the actor holds."""

    def __init__(self, config: Config, actor: ActorClient, prompts: PromptTable | None, scorer: Scorer) -> None:
        self._config = config
        self._actor = actor
        self._prompts = prompts
        self._scorer = scorer

    @property
    def has_prompts(self) -> bool:
        """Whether there is anything to validate on."""
        return self._prompts is not None

    async def evaluate(self, step: int) -> ValidationResult:
        """Answers and judges every validation prompt with the policy of `step`, which must be the committed one."""
        assert self._prompts is not None
        started_s = time.perf_counter()
        evaluation = self._config.evaluation
        verdicts: list[Verdict] = []
        timings_s: defaultdict[str, float] = defaultdict(float)
        spans: list[Span] = []
        for part, prompts in enumerate(self._prompts.parts(evaluation.batch_size)):
            reply, responses = await self._generate(prompts, step, part)
            judged_s = time.time()
            verdicts.append(
                await self._scorer.score(
                    prompts,
                    responses,
                    num_samples=evaluation.n,
                    num_examine=evaluation.num_examine if part == 0 else 0,
                )
            )
            spans += [
                reply.span("actor", "testing", step),
                Span("reward", "testing", step, judged_s, time.time()),
            ]
            for name, seconds in reply.timings_s.items():
                timings_s[name] += seconds
        outcomes = [
            Outcome.of(sample.data_source, (part, row // evaluation.n), verdict.result, row)
            for part, verdict in enumerate(verdicts)
            for row, sample in enumerate(verdict.samples)
        ]
        return ValidationResult(
            accuracy_by_source(outcomes),
            validation_metrics(outcomes),
            verdicts,
            {**timings_s, "testing": time.perf_counter() - started_s},
            spans,
        )

    async def _generate(self, prompts: PromptBatch, step: int, part: int) -> tuple[CommandReply, Batch]:
        evaluation, data = self._config.evaluation, self._config.data
        sampling = SamplingParams(
            temperature=evaluation.temperature,
            top_p=evaluation.top_p,
            top_k=evaluation.top_k,
            max_response_length=data.max_response_length,
        )
        slot = Slot(kind=SLOT_KIND_EVALUATION, step=step, part=part)
        await self._actor.put_batch(slot, prompts.to_batch(self._config.run.seed, step, evaluation.n))
        reply = await self._actor.generate(slot, sampling, base_step=step)
        return reply, await self._actor.get_batch(slot, ["responses"])
