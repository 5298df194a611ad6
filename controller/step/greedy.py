"""Greedy rollouts: the most likely response to each prompt, whose score is a baseline (ReMax)."""

from controller.data.prompts import PromptBatch
from controller.ppo.masked_stats import Float32s
from controller.step.context import StepContext
from controller.step.generation import SampledRollouts
from controller.step.parts import PartCalls, PendingRollouts


class GreedyRollouts:
    """A greedy rollout of each prompt of a step, whatever its length.

    Attributes:
        rollouts: the responses, on their way.
    """

    def __init__(self, step: StepContext, prompts: PromptBatch) -> None:
        self.rollouts: PendingRollouts = SampledRollouts.greedy(step, prompts)
        self._step = step

    async def scores(self) -> Float32s:
        """Returns [num_prompts], the scores of the greedy rollouts, without any penalty."""
        _, greedy = await PartCalls(self._step, self.rollouts, is_baseline=True).generate_and_score()
        self._step.record.metrics["critic/greedy_score/mean"] = float(greedy.scores.mean())
        return greedy.scores
