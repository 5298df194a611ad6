"""Decides where a run ends: after its last step, or when the prompts of its data epochs are used up."""

from dataclasses import dataclass
from typing import Self

from controller.data.prompts import PromptSource
from controller.run.state import RunState
from splitppo.config import Config


@dataclass(frozen=True)
class RunEnd:
    """The last step and the last batch of prompts of a run.

    It is computed once, because a user's sampler may need long to count the batches of its epochs.

    Attributes:
        last_step: the last step of this process.
        total_steps: the last step of the run, which may go on after this process (`run.stop_after_step`).
        last_draw: the number of the last batch of prompts in `run.total_epochs`; None without that key. Dynamic
            sampling may take this batch before the last step. That step may take further batches, and ends the run.
    """

    last_step: int
    total_steps: int
    last_draw: int | None

    @classmethod
    def of(cls, config: Config, prompts: PromptSource) -> Self:
        """Computes the end of a run from its configuration and its prompts."""
        total_steps = config.run.total_steps
        epochs = config.run.total_epochs
        assert total_steps is not None, "Inputs.with_last_step has set it"
        return cls(config.last_step, total_steps, None if epochs is None else prompts.num_steps(epochs))

    def has_step(self, step: int, first_draw: int) -> bool:
        """Returns True unless the run ends before this step; `first_draw` is the number of its first prompt batch."""
        return step <= self.total_steps and (self.last_draw is None or first_draw <= self.last_draw)

    def is_reached(self, state: RunState) -> bool:
        """Returns True if this process has nothing left to train after the step of `state`."""
        return state.step >= self.last_step or (self.last_draw is not None and state.draw >= self.last_draw)
