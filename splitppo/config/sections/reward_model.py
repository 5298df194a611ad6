"""The configuration section `reward_model`: a frozen sequence classifier that scores responses beside the scorers."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from splitppo.config.section import CONTROLLER_ONLY, IS_WORK, PositiveInt, ScoredTurns
from splitppo.config.sections.models import ComputedModelConfig

DEFAULT_COEF = "default"


class RewardModelConfig(ComputedModelConfig):
    """The settings of the reward model, a classifier with one label that reads messages and response.

    The reward model has its own tokenizer.
    """

    model: Annotated[str, IS_WORK] = ""
    """The reward model: a local folder or a hub name of a decoder that classifies sequences, with one label. Empty: no
    reward model."""

    tokenizer: Annotated[str | None, CONTROLLER_ONLY] = None
    """The folder or hub name of the tokenizer of the reward model. null: the tokenizer of reward_model.model."""

    chat_template: Annotated[Path | None, CONTROLLER_ONLY] = None
    """A Jinja file that replaces the chat template of this tokenizer. null: the template of the tokenizer."""

    max_length: Annotated[PositiveInt | None, CONTROLLER_ONLY] = None
    """The largest number of tokens that the reward model reads of a response with its messages. A longer row loses its
    first tokens. null: as many as the model has positions."""

    conversation: Annotated[ScoredTurns, CONTROLLER_ONLY] = "all"
    """The part of a conversation of several turns that is scored: all, with the answers of tools and environments, as
    chat messages; or last_turn, the model's last turn alone, as the answer to the prompt."""

    coef: Annotated[float | dict[str, float], CONTROLLER_ONLY] = 1.0
    """The number that the score of the reward model is multiplied by before it is added to the score of the scorers:
    one number, or one for each data_source, with `default` for all others."""

    rule_coef: Annotated[float, CONTROLLER_ONLY] = Field(1.0, ge=0.0)
    """The number that the score of the scorers is multiplied by in training. 0: the reward model alone scores, as in
    verl."""

    def _check_keys(self) -> None:
        super()._check_keys()
        if isinstance(self.coef, dict) and DEFAULT_COEF not in self.coef:
            named = ", ".join(self.coef) or "nothing"
            raise ValueError(f"coef: expected an entry {DEFAULT_COEF!r} beside those of data sources, got {named}")

    def coef_of(self, data_source: str) -> float:
        """Returns the number that multiplies the reward model's score of a response of this data source."""
        if isinstance(self.coef, dict):
            return self.coef.get(data_source, self.coef[DEFAULT_COEF])
        return self.coef
