"""What a step's responses are worth, as the experience takes it."""

from dataclasses import dataclass

from controller.ppo.masked_stats import Float32s, Mask
from splitppo.batch import Column


@dataclass(frozen=True, eq=False)
class Scores:
    """Of B responses to P prompts, in the order of the rollouts.

    Attributes:
        responses: [B], of each response, that of its tokens included.
        tokens: float32, aligned with responses: the part of the scores that is placed; None: all belongs to the ends.
        truncated: [B], whether the response was cut off; None: none was.
        components: [K, B], the parts of the scores that the estimator asks for.
        greedy: [P], of a greedy response to each prompt, where they are the baseline.
    """

    responses: Float32s
    tokens: Column | None = None
    truncated: Mask | None = None
    components: Float32s | None = None
    greedy: Float32s | None = None
