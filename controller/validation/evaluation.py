"""Validates the policy: the actor answers held-out prompts, and the scorer scores the answers."""

import time
from collections import defaultdict
from dataclasses import dataclass

from controller.data.prompts import PromptBatch
from controller.ppo.scores import Scores
from controller.scoring.scorer import Scorer, check_failures
from controller.validation.metrics import accuracy_by_source, validation_metrics
from controller.validation.result import ValidationResult
from controller.workers.actor_client import ActorClient, sampling_params
from controller.workers.span import Span
from splitppo.config import Config
from splitppo.v1.batch_pb2 import SLOT_KIND_EVALUATION, Slot


@dataclass(eq=False)
class Evaluator:
    """Validates the policy with the actor's weights; `prompts` is None if there are no validation prompts."""

    config: Config
    actor: ActorClient
    prompts: PromptBatch | None
    scorer: Scorer

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Returns True if a validation is due: before the run, every `evaluation.test_freq` steps, after the last step.

        With `val_only` a validation is due at any step.
        """
        evaluation = self.config.evaluation
        if self.prompts is None:
            return False
        if evaluation.val_only:
            return True
        if step == 0:
            return evaluation.val_before_train
        return is_last or (evaluation.test_freq > 0 and step % evaluation.test_freq == 0)

    async def evaluate(self, step: int) -> ValidationResult:
        """Samples and scores answers to every validation prompt by the policy of `step`, which must be committed."""
        assert self.prompts is not None
        started_s = time.perf_counter()
        evaluation = self.config.evaluation
        parts: list[Scores] = []
        timings_s: defaultdict[str, float] = defaultdict(float)
        spans: list[Span] = []
        sampling = sampling_params(evaluation, self.config.data)
        for part, prompts in enumerate(self.prompts.parts(evaluation.batch_size)):
            slot = Slot(kind=SLOT_KIND_EVALUATION, step=step, part=part)
            await self.actor.put_batch(slot, prompts.to_batch(self.config.run.seed, step, evaluation.n))
            reply = await self.actor.generate(slot, sampling, base_step=step)
            responses = await self.actor.get_batch(slot, ["responses"])
            scoring_s = time.time()
            examined = evaluation.num_examine if part == 0 else 0
            asked = prompts.repeated(evaluation.n)
            parts.append(await self.scorer.score(asked, responses, num_examine=examined))
            spans += [reply.span("actor", "testing", step), Span("scoring", "testing", step, scoring_s, time.time())]
            for name, seconds in reply.timings_s.items():
                timings_s[name] += seconds
        scores = Scores.join(parts)
        check_failures(scores, self.config.reward.max_error_rate, f"the validation of step {step}")
        accuracy, metrics = accuracy_by_source(scores), validation_metrics(scores)
        timings_s["testing"] = time.perf_counter() - started_s
        return ValidationResult(accuracy, metrics, scores, timings_s, spans)
