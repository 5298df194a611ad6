"""The section `reward_model`: a frozen sequence classifier that scores responses beside the reward functions."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from splitppo.config.section import CONTROLLER_ONLY, IS_WORK, PositiveInt
from splitppo.config.sections.models import ComputedModelConfig

DEFAULT_COEF = "default"


class RewardModelConfig(ComputedModelConfig):
    """A model with one label, which reads the messages and the response through its own tokenizer."""

    model: Annotated[str, IS_WORK] = ""
    """local folder or hub name of a decoder that classifies sequences, one label; empty: none"""

    tokenizer: Annotated[str | None, CONTROLLER_ONLY] = None
    """folder or hub name; default: reward_model.model"""

    chat_template: Annotated[Path | None, CONTROLLER_ONLY] = None
    """Jinja file that replaces the tokenizer's chat template"""

    max_length: Annotated[PositiveInt | None, CONTROLLER_ONLY] = None
    """tokens of a row; a longer one loses its first ones; default: the model's positions"""

    coef: Annotated[float | dict[str, float], CONTROLLER_ONLY] = 1.0
    """what the model's score is multiplied by before it is added to the reward function's: a number, or one per
    data_source, and `default` for the others"""

    rule_coef: Annotated[float, CONTROLLER_ONLY] = Field(1.0, ge=0.0)
    """what the reward function's score is multiplied by, in training; 0: the model's alone, as in verl"""

    def _check_keys(self) -> None:
        super()._check_keys()
        if isinstance(self.coef, dict) and DEFAULT_COEF not in self.coef:
            named = ", ".join(self.coef) or "nothing"
            raise ValueError(f"coef: expected an entry {DEFAULT_COEF!r} beside those of data sources, got {named}")

    def coef_of(self, data_source: str) -> float:
        """Returns the weight of the model's score in the score of a response of this source."""
        if isinstance(self.coef, dict):
            return self.coef.get(data_source, self.coef[DEFAULT_COEF])
        return self.coef
