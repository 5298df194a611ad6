"""Defines the result of one validation of the policy, which the run's state, summary and step record use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.ppo.scores import Scores
from splitppo.run_folder.spans import Span
from splitppo.run_folder.summary import Accuracy


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
