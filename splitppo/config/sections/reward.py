"""The configuration section `reward`: which scorers score a response, and the settings of the scorers."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from splitppo.config.section import MAY_CHANGE, PositiveInt, Section, Share
from splitppo.config.subsections.code import CodeConfig
from splitppo.config.subsections.judge import JudgeConfig
from splitppo.config.subsections.reward_shaping import RewardShapingConfig


class Term(Section):
    """One scorer of a data source, and the weight of its score in the weighted sum."""

    name: str
    """The name of the scorer: a data_source with a built-in scorer, custom (your own function), or judge."""

    weight: float = Field(1.0, ge=-1e6, le=1e6)
    """The number that the score of this scorer is multiplied by."""


def _each_once(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """Raises ValueError unless there are scorers, each of them once."""
    if not terms:
        raise ValueError("expected at least one scorer")
    names = [term.name for term in terms]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"expected each scorer once, {twice[0]!r} stands there {names.count(twice[0])} times")
    return terms


Terms = Annotated[tuple[Term, ...], AfterValidator(_each_once)]


class OverlongBuffer(Section):
    """A penalty on the score of long responses (Yu et al., 2025, DAPO, eq. 13).

    The score falls linearly over the last `len` tokens before data.max_response_length.
    """

    enable: bool = False
    """If true, long responses are penalised in training. Validation has no penalty."""

    len: PositiveInt | None = None
    """The number of tokens before data.max_response_length over which the score falls. It must be set if enable is
    true."""

    penalty_factor: float = Field(1.0, gt=0.0)
    """The amount that the score of a response of data.max_response_length tokens loses."""

    log: bool = True
    """If true, the metrics reward_extra/overlong_reward/* and reward_extra/overlong/* are recorded."""

    def _check_keys(self) -> None:
        if self.enable and self.len is None:
            raise ValueError("enable needs len, in tokens")


class RewardConfig(Section):
    """The settings of scoring responses: by functions (built-in or the user's), tests of programs, and a judge."""

    scorers: dict[str, Terms] = Field(default_factory=dict)
    """The scorers of each data_source, and under `default` those of all others: [{name, weight}, ...]. The score is
    their weighted sum. A data_source without an entry is scored by your function, or without one by the built-in
    scorer."""

    custom_function_path: Path | None = None
    """A Python file with your own scoring function. null: built-in scorers only."""

    custom_function_name: str = "compute_score"
    """The name of the scoring function in that file."""

    custom_function_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments that the scoring function is called with."""

    num_workers: Annotated[PositiveInt, MAY_CHANGE] = 1
    """The number of processes that call scoring functions."""

    timeout_s: Annotated[float, MAY_CHANGE] = Field(30.0, gt=0.0)
    """The largest number of seconds that one call of a scoring function may take. A call that takes longer scores 0,
    and is counted as failed."""

    max_error_rate: Annotated[Share, MAY_CHANGE] = 0.2
    """The largest share of the scores of a step or of a validation that may fail. If more fail, the run ends."""

    num_examine: Annotated[int, MAY_CHANGE] = Field(0, ge=0)
    """The number of training samples that are shown for each data_source in each step."""

    code: Annotated[CodeConfig, MAY_CHANGE] = CodeConfig()
    overlong_buffer: OverlongBuffer = OverlongBuffer()
    shaping: RewardShapingConfig = RewardShapingConfig()
    judge: JudgeConfig = JudgeConfig()

    def _check_keys(self) -> None:
        if self.custom_function_kwargs and self.custom_function_path is None:
            raise ValueError("custom_function_kwargs is given, but no custom_function_path")
