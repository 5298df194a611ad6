"""Validation: the policy answers held-out prompts, the rewards score the answers."""

import time
from collections import defaultdict

from controller.data.prompts import PromptBatch
from controller.rollout.results import ScoredResponses, ValidationResult
from controller.rollout.scoring import Scorer
from controller.rollout.stream import sampling_params
from controller.rollout.validation_metrics import accuracy_by_source, validation_metrics
from controller.workers.actor_client import ActorClient
from controller.workers.command import CommandReply
from controller.workers.span import Span
from splitppo.batch import Batch
from splitppo.config import Config
from splitppo.v1.batch_pb2 import SLOT_KIND_EVALUATION, Slot


class Evaluator:
    """Validates the policy that the actor holds."""

    def __init__(self, config: Config, actor: ActorClient, prompts: PromptBatch | None, scorer: Scorer) -> None:
        self._config = config
        self._actor = actor
        self._prompts = prompts
        self._scorer = scorer

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        """Whether to validate: before the run, every `evaluation.test_freq` steps and after the last step.

        That is the configuration's last one, or one that `is_last` says is.

        With `val_only` it is due at whatever step the run is.
        """
        evaluation = self._config.evaluation
        if self._prompts is None:
            return False
        if evaluation.val_only:
            return True
        if step == 0:
            return evaluation.val_before_train
        return (
            is_last or step == self._config.last_step or (evaluation.test_freq > 0 and step % evaluation.test_freq == 0)
        )

    async def evaluate(self, step: int) -> ValidationResult:
        """Answers and scores every validation prompt with the policy of `step`, which must be the committed one."""
        assert self._prompts is not None
        started_s = time.perf_counter()
        evaluation = self._config.evaluation
        scored: list[ScoredResponses] = []
        timings_s: defaultdict[str, float] = defaultdict(float)
        spans: list[Span] = []
        for part, prompts in enumerate(self._prompts.parts(evaluation.batch_size)):
            reply, responses = await self._generate(prompts, step, part)
            scoring_s = time.time()
            examined = evaluation.num_examine if part == 0 else 0
            asked = prompts.repeated(evaluation.n)
            scored.append(await self._scorer.score(asked, responses, num_examine=examined))
            spans += [reply.span("actor", "testing", step), Span("scoring", "testing", step, scoring_s, time.time())]
            for name, seconds in reply.timings_s.items():
                timings_s[name] += seconds
        answers = ScoredResponses.join(scored)
        answers.check_failures(self._config.reward.max_error_rate, f"the validation of step {step}")
        accuracy, metrics = accuracy_by_source(answers.samples), validation_metrics(answers.samples)
        timings_s["testing"] = time.perf_counter() - started_s
        return ValidationResult(accuracy, metrics, answers, timings_s, spans)

    async def _generate(self, prompts: PromptBatch, step: int, part: int) -> tuple[CommandReply, Batch]:
        evaluation = self._config.evaluation
        sampling = sampling_params(evaluation, self._config.data)
        slot = Slot(kind=SLOT_KIND_EVALUATION, step=step, part=part)
        await self._actor.put_batch(slot, prompts.to_batch(self._config.run.seed, step, evaluation.n))
        reply = await self._actor.generate(slot, sampling, base_step=step)
        return reply, await self._actor.get_batch(slot, ["responses"])
