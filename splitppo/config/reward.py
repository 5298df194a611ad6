"""The section `reward`."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from splitppo.config.code import CodeConfig
from splitppo.config.judge import JudgeConfig
from splitppo.config.reward_shaping import RewardShapingConfig
from splitppo.config.section import PositiveInt, Section, Share


class Term(Section):
    """A scorer's part in the score of a data source."""

    name: str = Field(description="a scorer: a data source with a built-in one, custom, or judge")
    weight: float = Field(1.0, description="what its score is multiplied by")


def _each_once(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    if not terms:
        raise ValueError("expected at least one scorer")
    names = [term.name for term in terms]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"expected each scorer once, {twice[0]!r} stands there {names.count(twice[0])} times")
    return terms


Terms = Annotated[tuple[Term, ...], AfterValidator(_each_once)]


class OverlongBuffer(Section):
    """Soft punishment of long responses (Yu et al., 2025, DAPO, eq. 13): over the last `len` tokens the score falls."""

    enable: bool = Field(False, description="punish them, in training")
    len: PositiveInt | None = Field(None, description="tokens before data.max_response_length over which it falls")
    penalty_factor: float = Field(1.0, gt=0.0, description="what the longest responses lose")
    log: bool = Field(True, description="metrics reward_extra/overlong_reward/* and reward_extra/overlong/*")

    @model_validator(mode="after")
    def _it_has_a_length(self) -> "OverlongBuffer":
        if self.enable and self.len is None:
            raise ValueError("enable needs len, in tokens")
        return self

    def penalty(self, num_tokens: int, max_response_length: int) -> float:
        """What a response of so many tokens loses: from -penalty_factor at the limit up to 0 at `len` tokens before it.

        penalty = min(0, -penalty_factor * (num_tokens - (max_response_length - len)) / len)
        """
        if not self.enable or self.len is None:
            return 0.0
        num_exceeding = num_tokens - (max_response_length - self.len)
        return -self.penalty_factor * max(num_exceeding, 0) / self.len


class RewardConfig(Section):
    """Scoring of responses: by functions in worker processes, by a judge, or by several of them together."""

    scorers: dict[str, Terms] = Field(
        default_factory=dict,
        description="by data_source, or `default` for the others: [{name, weight}, ...], whose weighted sum is the"
        " score; where none is named, the user's function, else the built-in scorer of that data_source",
    )
    custom_function_path: Path | None = Field(None, description="Python file with a user's scoring function")
    custom_function_name: str = Field("compute_score", description="its name in that file")
    custom_function_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="further arguments that it is called with"
    )
    num_workers: PositiveInt = Field(1, description="scoring processes")
    timeout_s: float = Field(30.0, gt=0.0, description="seconds per call; a call that takes longer scores 0, counted")
    max_error_rate: Share = Field(
        0.2, description="share of a step's or a validation's scores that may fail; more of them end the run"
    )
    num_examine: int = Field(0, ge=0, description="training samples printed per data source and step")
    code: CodeConfig = CodeConfig()
    overlong_buffer: OverlongBuffer = OverlongBuffer()
    shaping: RewardShapingConfig = RewardShapingConfig()
    judge: JudgeConfig = JudgeConfig()

    @model_validator(mode="after")
    def _kwargs_belong_to_a_function(self) -> "RewardConfig":
        if self.custom_function_kwargs and self.custom_function_path is None:
            raise ValueError("custom_function_kwargs is given, but no custom_function_path")
        return self
