"""Validates the policy: the groups that sample answer held-out prompts, and the scorer scores the answers."""

import time
from dataclasses import dataclass

import numpy as np

from controller.conversations.conversation import check_lost, conversation_metrics
from controller.data.prompts import PromptBatch
from controller.ppo.scores import Scores
from controller.sampling.stream import Asked, Part, SamplingGroups, sample
from controller.sampling.talk import Talk
from controller.scoring.scorer import Scorer, check_failures
from controller.validation.metrics import accuracy_by_source, validation_metrics
from controller.validation.result import ValidationResult
from controller.workers.clients import sampling_params
from controller.workers.work import Work
from rewards.source import FailureLimit
from splitppo.config import Config
from splitppo.v1.batch_pb2 import SLOT_KIND_EVALUATION, Slot


@dataclass(eq=False)
class Evaluator:
    """Validates the policy with the actor's weights; `prompts` is None if there are no validation prompts."""

    config: Config
    sampling: SamplingGroups
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
        max_error_rate = self.config.reward.max_error_rate
        failures = FailureLimit(max_error_rate * evaluation.n * self.prompts.num_prompts)
        work = Work(step)
        parts: list[Scores] = []
        lengths = []
        for number, prompts in enumerate(self.prompts.parts(evaluation.batch_size)):
            answers = await self._answers(prompts, number, work)
            lengths.append(answers.rollouts["responses"].lengths)
            num_examine = evaluation.num_examine if number == 0 else 0
            with work.span("scoring", "testing"):
                scores = await self.scorer.score(
                    answers.prompts, answers.rollouts, answers.conversations, num_examine=num_examine, limit=failures
                )
            parts.append(scores)
        scores = Scores.join(parts)
        check_failures(scores, max_error_rate, f"the validation of step {step}")
        check_lost(scores, self.config.rollout.multi_turn, f"the validation of step {step}")
        accuracy = accuracy_by_source(scores)
        metrics = validation_metrics(scores)
        turns = conversation_metrics(scores.conversations).items()
        metrics |= {f"val-aux/{name}": value for name, value in turns if name.startswith("num_turns")}
        work.timings_s["testing"] = time.perf_counter() - started_s
        work.timings_s.pop("environment", None)  # as a metric it is that of the step
        return ValidationResult(accuracy, metrics, scores, work.timings_s, work.spans, np.concatenate(lengths))

    async def _answers(self, prompts: PromptBatch, number: int, work: Work) -> Part:
        """Has the answers to one batch of the validation prompts sampled; returns them in the order of the prompts."""
        evaluation = self.config.evaluation
        run_seed = self.config.run.seed
        slot = Slot(kind=SLOT_KIND_EVALUATION, step=work.step, part=number)
        asked = Asked(
            prompts=prompts,
            seeded=prompts.to_batch(run_seed, work.step, evaluation.n),
            version=work.step,
            params=sampling_params(evaluation, self.config.data),
            slot=slot,
            work="testing",
            # At step 0: environments begin in the same states in every validation.
            talk=Talk.about(self.sampling.environments, prompts.repeated(evaluation.n), run_seed, 0),
        )
        return Part.join(slot, [part async for part in sample(self.sampling, asked, work)])
