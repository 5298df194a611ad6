"""Defines the result of one validation of the policy, which the run's state, summary and step record use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from controller.ppo.scores import Scores
from splitppo.run_folder.spans import Span


class Accuracy(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The accuracies of one validation, overall and per data source, each in [0, 1]."""

    overall: float = Field(description="mean over all validation responses")
    by_source: dict[str, float] = Field(default_factory=dict, description="mean per data source")


@dataclass(frozen=True)
class ValidationResult:
    """The result of one validation: accuracy, metrics val/..., val-core/... and val-aux/..., scores, timings, spans.

    `timings_s` has the seconds of the whole validation under "testing", and the timings of the engine, e.g.
    "update_weights". `lengths` has the number of tokens of each response.
    """

    accuracy: Accuracy
    metrics: Mapping[str, float]
    scores: Scores
    timings_s: Mapping[str, float]
    spans: Sequence[Span] = ()
    lengths: NDArray[np.int32] | None = None
