"""The section `reward`."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from splitppo.config.section import MAY_CHANGE, PositiveInt, Section, Share
from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.judge import JudgeConfig
from splitppo.config.subsections.reward_shaping import RewardShapingConfig


class Term(Section):
    """A scorer's part in the score of a data source."""

    name: str
    """a scorer: a data source with a built-in one, custom, or judge"""

    weight: float = 1.0
    """what its score is multiplied by"""


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

    enable: bool = False
    """punish them, in training"""

    len: PositiveInt | None = None
    """tokens before data.max_response_length over which it falls"""

    penalty_factor: float = Field(1.0, gt=0.0)
    """what the longest responses lose"""

    log: bool = True
    """metrics reward_extra/overlong_reward/* and reward_extra/overlong/*"""

    def _check_keys(self) -> None:
        if self.enable and self.len is None:
            raise ValueError("enable needs len, in tokens")


class RewardConfig(Section):
    """Scoring of responses: by functions in worker processes, by a judge, or by several of them together."""

    scorers: dict[str, Terms] = Field(default_factory=dict)
    """by data_source, or `default` for the others: [{name, weight}, ...], whose weighted sum is the score; where none
    is named, the user's function, else the built-in scorer of that data_source"""

    custom_function_path: Path | None = None
    """Python file with a user's scoring function"""

    custom_function_name: str = "compute_score"
    """its name in that file"""

    custom_function_kwargs: dict[str, Any] = Field(default_factory=dict)
    """further arguments that it is called with"""

    num_workers: Annotated[PositiveInt, MAY_CHANGE] = 1
    """scoring processes"""

    timeout_s: Annotated[float, MAY_CHANGE] = Field(30.0, gt=0.0)
    """seconds per call; a call that takes longer scores 0, counted"""

    max_error_rate: Annotated[Share, MAY_CHANGE] = 0.2
    """share of a step's or a validation's scores that may fail; more of them end the run"""

    num_examine: Annotated[int, MAY_CHANGE] = Field(0, ge=0)
    """training samples printed per data source and step"""

    code: Annotated[CodeConfig, MAY_CHANGE] = CodeConfig()
    overlong_buffer: OverlongBuffer = OverlongBuffer()
    shaping: RewardShapingConfig = RewardShapingConfig()
    judge: JudgeConfig = JudgeConfig()

    def _check_keys(self) -> None:
        if self.custom_function_kwargs and self.custom_function_path is None:
            raise ValueError("custom_function_kwargs is given, but no custom_function_path")
