"""The section `actor.policy_loss`: which loss the policy has, and what single losses have beside the clip range."""

import difflib
from typing import Self

from pydantic import Field, model_validator

from splitppo.config.section import Section

# The functions are services/actor/losses/registry.py's.
LOSS_MODES = ("vanilla",)


class PolicyLossConfig(Section):
    """The policy's loss, by name; keys are verl's."""

    loss_mode: str = Field("vanilla", description=" | ".join(LOSS_MODES))

    @model_validator(mode="after")
    def _the_loss_is_known(self) -> Self:
        self.check_loss_mode(self.loss_mode)
        return self

    def check_loss_mode(self, name: str) -> None:
        """ValueError if there is no loss of that name; the sentence lists the known ones, and the nearest."""
        if name not in LOSS_MODES:
            nearest = difflib.get_close_matches(name, LOSS_MODES, n=1)
            suggestion = f", did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"loss_mode: expected one of {', '.join(LOSS_MODES)}, got {name!r}{suggestion}")
