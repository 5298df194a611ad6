"""Predicts learned tokens per second of partial rollouts from forced lengths and the cost of a decoding step.

It follows the schedule of controller/step/partial.py, whose functions decide what is drawn, and an engine that decodes
up to `max_batch_size` rows together. A row joins as soon as another one has ended. Nothing runs and nothing is timed,
so the prediction says what the schedule alone brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from controller.step.partial import num_to_draw
from splitppo.config.subsections.response_lengths import LogNormalLengths


class Costs(NamedTuple):
    """What an engine needs, in units of one decoding step without rows.

    Attributes:
        per_row: of each row in a decoding step.
        per_begun_token: of each token that a response has already, when it goes on.
        per_learned_token: of all that follows on the responses of a step, for each of their tokens.
    """

    per_row: float = 0.0
    per_begun_token: float = 0.0
    per_learned_token: float = 0.0


class Work(NamedTuple):
    """Prompts of a step, and samples and lengths of the responses to each."""

    num_prompts: int
    num_samples: int
    lengths: LogNormalLengths


class Setting(NamedTuple):
    """`rollout.max_step_tokens` (None: off), `rollout.max_batch_size`, `rollout.overcommit`."""

    max_step_tokens: int | None
    max_batch_size: int
    overcommit: float = 1.5


class Predicted(NamedTuple):
    """A mean step: its cost without learning, learned tokens, rounds of sampling, and the most updates of an age."""

    generation: float
    num_tokens: float
    num_rounds: float
    max_age: int

    def cost(self, costs: Costs) -> float:
        """Returns the cost of the step, learning included."""
        return self.generation + costs.per_learned_token * self.num_tokens

    def tokens_per_cost(self, costs: Costs) -> float:
        """Returns learned tokens per unit of cost."""
        return self.num_tokens / self.cost(costs)


@dataclass(eq=False)
class _Prompt:
    """A prompt that was drawn in `step`: the lengths of its responses, and the tokens that they have."""

    step: int
    lengths: Sequence[int]
    begun: list[int]

    @property
    def unfinished(self) -> list[int]:
        return [place for place, length in enumerate(self.lengths) if self.begun[place] < length]


def decoding_cost(num_tokens: Sequence[int], max_batch_size: int, costs: Costs) -> float:
    """Returns the cost of decoding rows that need so many tokens each, in this order."""
    cost = 0.0
    waiting = list(reversed(num_tokens))
    decoded: list[int] = []
    while waiting or decoded:
        while waiting and len(decoded) < max_batch_size:
            decoded.append(waiting.pop())
        num_steps = min(decoded)
        cost += num_steps * (1.0 + costs.per_row * len(decoded))
        decoded = [left - num_steps for left in decoded if left > num_steps]
    return cost


def predict(work: Work, setting: Setting, costs: Costs, *, num_steps: int = 40, num_left_out: int = 15) -> Predicted:
    """Returns the mean step, without the first ones: a run begins with short responses."""
    seeds = iter(np.random.default_rng(0).integers(0, 2**62, 10**6).tolist())
    drawn: list[_Prompt] = []
    cost, num_tokens, num_rounds, max_age = 0.0, 0, 0, 0

    def draw(step: int, num_prompts: int) -> None:
        for _ in range(num_prompts):
            lengths = [work.lengths.of(next(seeds)) for _ in range(work.num_samples)]
            drawn.append(_Prompt(step, lengths, [0] * work.num_samples))

    def sample() -> float:
        """Has each unfinished response get its tokens of a round; returns the cost."""
        goes_on = [(prompt, place) for prompt in drawn for place in prompt.unfinished]
        begun = sum(prompt.begun[place] for prompt, place in goes_on)
        num_new = []
        for prompt, place in goes_on:
            left = prompt.lengths[place] - prompt.begun[place]
            num_new.append(left if setting.max_step_tokens is None else min(left, setting.max_step_tokens))
            prompt.begun[place] += num_new[-1]
        return decoding_cost(num_new, setting.max_batch_size, costs) + costs.per_begun_token * begun

    for step in range(1, num_steps + 1):
        is_counted = step > num_left_out
        while True:
            if setting.max_step_tokens is None:
                draw(step, work.num_prompts)
            else:
                num_unfinished = sum(len(prompt.unfinished) for prompt in drawn)
                wanted = setting.overcommit * work.num_prompts * work.num_samples
                most = 2 * work.num_prompts
                draw(step, num_to_draw(len(drawn), num_unfinished, work.num_samples, num_wanted=wanted, most=most))
            cost += sample() * is_counted
            num_rounds += is_counted
            complete = [prompt for prompt in drawn if not prompt.unfinished]
            if len(complete) >= work.num_prompts:
                break
        learned = complete[: work.num_prompts]
        drawn = [prompt for prompt in drawn if prompt not in learned]
        num_tokens += sum(sum(prompt.lengths) for prompt in learned) * is_counted
        max_age = max(max_age, *(step - prompt.step for prompt in learned))
    num_counted = num_steps - num_left_out
    return Predicted(cost / num_counted, num_tokens / num_counted, num_rounds / num_counted, max_age)


def calibrated(work: Work, off: Setting, costs: Costs, generation_share: float) -> Costs:
    """Returns the costs with that of learning at which generation takes this share of a step of `off`."""
    predicted = predict(work, off, costs)
    learning = predicted.generation * (1 - generation_share) / generation_share
    return costs._replace(per_learned_token=learning / predicted.num_tokens)
