"""The section `evaluation`."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from splitppo.config.section import PositiveInt, Section, Share, expected
from splitppo.config.sections.rollout import MIN_TEMPERATURE

# Which values of a metric are better.
MetricMode = Literal["max", "min"]


_NAMES = "val/accuracy, or a name that begins with val-core/ or val-aux/"


def _is_of_validation(name: str) -> bool:
    return name == "val/accuracy" or name.startswith(("val-core/", "val-aux/"))


def _is_temperature(value: float) -> bool:
    return value == 0.0 or value >= MIN_TEMPERATURE


ValidationMetric = Annotated[str, AfterValidator(expected(_NAMES, _is_of_validation))]
Temperature = Annotated[
    float, Field(ge=0.0), AfterValidator(expected(f"0 (greedy) or at least {MIN_TEMPERATURE:g}", _is_temperature))
]


class EarlyStopConfig(Section):
    """The run ends, completed, once `patience` validations in a row were no better than the best before them."""

    metric: ValidationMetric | None = None
    """of validation, e.g. val/accuracy; null: off"""

    mode: MetricMode = "max"
    """which values are better: the larger or the smaller ones"""

    patience: PositiveInt = 3
    """validations in a row without a better one"""

    min_delta: float = Field(0.0, ge=0.0)
    """a value counts as better if it is so by more than this"""


class EvaluationConfig(Section):
    """Validation on held-out prompts."""

    test_freq: int = Field(-1, ge=-1)
    """steps between validations; -1: only before and after the run"""

    val_before_train: bool = True
    """validate the initial policy (step 0)"""

    val_only: bool = False
    """validate the policy that the run starts from, and exit"""

    n: PositiveInt = 1
    """responses per validation prompt"""

    temperature: Temperature = 0.0
    """0 is greedy"""

    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """nucleus"""

    top_k: int = Field(0, ge=0)
    """0 keeps every token"""

    batch_size: PositiveInt = 1024
    """prompts per Generate call"""

    num_examine: int = Field(1, ge=0)
    """samples printed per data source"""

    dump_generations: bool = True
    """write all responses of a validation to rollouts/val/{step}.jsonl"""

    min_accuracy: Share = 0.0
    """exit 1 if the final overall accuracy is lower; 0: off"""

    early_stop: EarlyStopConfig = EarlyStopConfig()
