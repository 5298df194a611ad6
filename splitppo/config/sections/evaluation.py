"""The configuration section `evaluation`: validation on held-out prompts, and early stop."""

from typing import Annotated, Literal

from pydantic import Field

from splitppo.config.section import PositiveInt, Section, Share, expected
from splitppo.config.sections.rollout import MIN_TEMPERATURE

# The better values of a metric: the larger or the smaller ones.
MetricMode = Literal["max", "min"]

ValidationMetric = Annotated[
    str,
    expected(
        "val/accuracy, or a name that begins with val-core/ or val-aux/",
        lambda name: name == "val/accuracy" or name.startswith(("val-core/", "val-aux/")),
    ),
]
Temperature = Annotated[
    float,
    Field(ge=0.0),
    expected(f"0 (greedy) or at least {MIN_TEMPERATURE:g}", lambda value: value == 0.0 or value >= MIN_TEMPERATURE),
]


class EarlyStopConfig(Section):
    """Early stop: the run ends, completed, after `patience` validations in a row without a better value."""

    metric: ValidationMetric | None = None
    """The metric of validation that is watched: val/accuracy, or a name that begins with val-core/ or val-aux/. null:
    no early stop."""

    mode: MetricMode = "max"
    """The direction of better values of the metric. max: larger values. min: smaller values."""

    patience: PositiveInt = 3
    """The number of validations in a row without a better value after which the run ends."""

    min_delta: float = Field(0.0, ge=0.0)
    """A value is better only if it differs from the best value so far by more than this."""


class EvaluationConfig(Section):
    """The settings of validation, in which the policy answers the prompts of data.val_files."""

    test_freq: int = Field(-1, ge=-1)
    """The number of steps from one validation to the next. -1: only before the first step and after the last step."""

    val_before_train: bool = True
    """If true, the initial policy is validated before the first step."""

    val_only: bool = False
    """If true, the policy that the run starts from is validated, and the run ends without training."""

    n: PositiveInt = 1
    """The number of responses for each validation prompt."""

    temperature: Temperature = 0.0
    """The number that divides the logits when responses of a validation are sampled. 0: greedy decoding, which takes
    the most likely token."""

    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Tokens of a validation are sampled from the smallest set of most likely tokens whose probabilities add up to this
    number. 1: from all tokens."""

    top_k: int = Field(0, ge=0)
    """Tokens of a validation are sampled from this many most likely tokens. 0: from all tokens."""

    batch_size: PositiveInt = 1024
    """The number of validation prompts that the actor answers in one Generate call."""

    num_examine: int = Field(1, ge=0)
    """The number of validation samples that are shown for each data_source."""

    dump_generations: bool = True
    """If true, all responses of a validation are written to rollouts/val/{step}.jsonl in the run folder."""

    min_accuracy: Share = 0.0
    """The run ends with exit code 1 if val/accuracy of the last validation is lower. val/accuracy is the mean of acc
    over all validation responses, or of the score if scorers return no acc. 0: not checked."""

    early_stop: EarlyStopConfig = EarlyStopConfig()
