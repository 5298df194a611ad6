"""Samples and scores greedy rollouts: the most likely response to each prompt, whose score is ReMax's baseline."""

from controller.data.prompts import PromptBatch
from controller.ppo.masked_stats import Float32s
from controller.step.context import StepContext
from controller.step.generation import SampledRollouts
from controller.step.parts import PartCalls, PendingRollouts


class GreedyRollouts:
    """The greedy responses to the prompts of a step, one per prompt, and their scores.

    Attributes:
        rollouts: the responses, which may not be sampled yet.
    """

    def __init__(self, step: StepContext, prompts: PromptBatch) -> None:
        self.rollouts: PendingRollouts = SampledRollouts.greedy(step, prompts)
        self._step = step

    async def scores(self) -> Float32s:
        """Has the actor sample greedy responses, scores them without any penalty; returns the scores, [num_prompts]."""
        _, greedy = await PartCalls(self._step, self.rollouts, is_baseline=True).generate_and_score()
        self._step.record.metrics["critic/greedy_score/mean"] = float(greedy.scores.mean())
        return greedy.scores
