"""Validates the policy: the groups that sample answer held-out prompts, and the scorer scores the answers."""

import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from controller.conversations.conversation import check_lost, conversation_metrics
from controller.conversations.environments import Environments
from controller.data.prompts import PromptBatch
from controller.ppo.scores import Scores
from controller.sampling.stream import Share, deal
from controller.sampling.talk import OneTurn, conversations_of
from controller.sampling.versions import OnReply, Sampler
from controller.schedule import run_calls
from controller.scoring.scorer import Scorer, check_failures
from controller.validation.metrics import accuracy_by_source, validation_metrics
from controller.validation.result import ValidationResult
from controller.workers.clients import sampling_params
from controller.workers.command import CommandReply
from rewards.source import FailureLimit
from splitppo.batch import Batch, join_parts
from splitppo.clock import unix_s
from splitppo.config import Config
from splitppo.run_folder.spans import MAX_ENVIRONMENT_SPANS, Span, joined
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import SLOT_KIND_EVALUATION, Slot


@dataclass(eq=False)
class Evaluator:
    """Validates the policy with the actor's weights; `prompts` is None if there are no validation prompts."""

    config: Config
    sampler: Sampler
    prompts: PromptBatch | None
    scorer: Scorer
    environments: Environments | None = None

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
        lengths: list[NDArray[np.int32]] = []
        timings_s: defaultdict[str, float] = defaultdict(float)
        spans: list[Span] = []
        sampling = sampling_params(evaluation, self.config.data)
        failures = FailureLimit(self.config.reward.max_error_rate * evaluation.n * self.prompts.num_prompts)

        def on_reply(pool: str, name: str, reply: CommandReply) -> None:
            spans.extend(reply.spans(pool, name, step))
            for timing, seconds in reply.timings_s.items():
                timings_s[timing] += seconds

        for part, prompts in enumerate(self.prompts.parts(evaluation.batch_size)):
            slot = Slot(kind=SLOT_KIND_EVALUATION, step=step, part=part)
            shares = deal(self.sampler, prompts.to_batch(self.config.run.seed, step, evaluation.n), slot)
            # At step 0: environments begin in the same states in every validation.
            talks = conversations_of(self.environments, prompts.repeated(evaluation.n), self.config.run.seed, 0)
            calls = [partial(self._answers, share, sampling, on_reply, talks) for share in shares]
            async with talks:
                answers = await run_calls(self.config.run.schedule, *calls)
            spans += joined(talks.spans(step), MAX_ENVIRONMENT_SPANS)
            scoring_s = unix_s()
            examined = evaluation.num_examine if part == 0 else 0
            asked = talks.asked
            conversations = talks.at(range(talks.asked.num_prompts))
            rollouts = join_parts(answers)
            lengths.append(rollouts["responses"].lengths)
            parts.append(await self.scorer.score(asked, rollouts, conversations, num_examine=examined, limit=failures))
            spans.append(Span("scoring", "testing", step, scoring_s, unix_s()))
        scores = Scores.join(parts)
        check_failures(scores, self.config.reward.max_error_rate, f"the validation of step {step}")
        check_lost(scores, self.config.rollout.multi_turn.max_error_rate, f"the validation of step {step}")
        accuracy = accuracy_by_source(scores)
        metrics = validation_metrics(scores)
        turns = conversation_metrics(scores.conversations).items()
        metrics |= {f"val-aux/{name}": value for name, value in turns if name.startswith("num_turns")}
        timings_s["testing"] = time.perf_counter() - started_s
        return ValidationResult(accuracy, metrics, scores, timings_s, spans, np.concatenate(lengths))

    async def _answers(self, share: Share, sampling: SamplingParams, on_reply: OnReply, talks: OneTurn) -> Batch:
        rows: list[Batch] = []
        reply = await share.sample(
            share.slot.step, sampling, ("responses",), on_reply=on_reply, on_rows=rows.append, converse=talks.converse
        )
        on_reply(share.client.role, "testing", reply)
        return rows[0]
