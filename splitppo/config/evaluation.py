"""The section `evaluation`."""

from typing import Annotated

from pydantic import AfterValidator, Field

from splitppo.config.rollout import MIN_TEMPERATURE
from splitppo.config.section import PositiveInt, Section, Share


def _greedy_or_sampled(value: float) -> float:
    if 0.0 < value < MIN_TEMPERATURE:
        raise ValueError(f"expected 0 (greedy) or at least {MIN_TEMPERATURE:g}, got {value:g}")
    return value


class EvaluationConfig(Section):
    """Validation on held-out prompts."""

    test_freq: int = Field(-1, ge=-1, description="steps between validations; -1: only before and after the run")
    val_before_train: bool = Field(True, description="validate the initial policy (step 0)")
    n: PositiveInt = Field(1, description="responses per validation prompt")
    temperature: Annotated[float, AfterValidator(_greedy_or_sampled)] = Field(0.0, ge=0.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus")
    top_k: int = Field(0, ge=0, description="0 keeps every token")
    batch_size: PositiveInt = Field(1024, description="prompts per Generate call")
    num_examine: int = Field(1, ge=0, description="samples printed per data source")
    min_accuracy: Share = Field(0.0, description="exit 1 if the final overall accuracy is lower; 0: off")
