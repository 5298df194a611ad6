"""The section `reward_model`: a frozen sequence classifier that scores responses beside the reward functions."""

from pathlib import Path

from pydantic import Field, model_validator

from splitppo.config.models import ComputedModelConfig
from splitppo.config.section import PositiveInt

DEFAULT_COEF = "default"


class RewardModelConfig(ComputedModelConfig):
    """A model with one label, which reads the messages and the response through its own tokenizer."""

    model: str = Field(
        "", description="local folder or hub name of a decoder that classifies sequences, one label; empty: none"
    )
    tokenizer: str | None = Field(None, description="folder or hub name; default: reward_model.model")
    chat_template: Path | None = Field(None, description="Jinja file that replaces the tokenizer's chat template")
    max_length: PositiveInt | None = Field(
        None, description="tokens of a row; a longer one loses its first ones; default: the model's positions"
    )
    coef: float | dict[str, float] = Field(
        1.0,
        description="what the model's score is multiplied by before it is added to the reward function's: a number, or"
        " one per data_source, and `default` for the others",
    )

    @model_validator(mode="after")
    def _coef_covers_every_source(self) -> "RewardModelConfig":
        if isinstance(self.coef, dict) and DEFAULT_COEF not in self.coef:
            named = ", ".join(self.coef) or "nothing"
            raise ValueError(f"coef: expected an entry {DEFAULT_COEF!r} beside those of data sources, got {named}")
        return self

    def coef_of(self, data_source: str) -> float:
        """The weight of the model's score in the score of a response of this source."""
        if isinstance(self.coef, dict):
            return self.coef.get(data_source, self.coef[DEFAULT_COEF])
        return self.coef
