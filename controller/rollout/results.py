"""What scoring and validation give: every response with its score, and accuracies."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from controller.workers.span import Span
from rewards.samples import Failure
from splitppo.config import ConfigError


@dataclass(frozen=True)
class ScoredSample:
    """One of the n responses to a prompt, and what the rewards say about it.

    Attributes:
        prompt, response: decoded.
        score: float32; 0 where the scorer failed.
        ground_truth, data_source, prompt_index: of the prompt's row, and its place in the table.
        has_ended: whether the response ends with an EOS token.
        extra: the other fields of the scorer's dict.
        failure: why there is no score; None if there is one.
        rule_score, model_score: what the reward function and the reward model gave, where a reward model is there; None
            where the data source has no function, and where nothing was combined.
    """

    prompt: str
    response: str
    score: float
    ground_truth: Any
    data_source: str
    prompt_index: int = 0
    has_ended: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    rule_score: float | None = None
    model_score: float | None = None


@dataclass(frozen=True)
class ScoredResponses:
    """B responses with their scores, in the order of the rollouts."""

    samples: Sequence[ScoredSample]

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        """The responses of several parts, one part after the other."""
        return cls([sample for part in parts for sample in part.samples])

    def take(self, indices: NDArray[np.int64]) -> "ScoredResponses":
        """The responses at `indices`, in that order."""
        return ScoredResponses([self.samples[index] for index in indices])

    def with_model_scores(
        self, model_scores_B: NDArray[np.float32], coef_of: Callable[[str], float], scored_sources: frozenset[str]
    ) -> "ScoredResponses":
        """The same responses, their scores combined with those of the reward model.

            score = rule score + coef(data source) * model score

        without the first term where the data source is not one of `scored_sources`, which have a reward function.

        Raises:
            ConfigError: a score of the reward model is not finite.
        """
        if not np.isfinite(model_scores_B).all():
            row = int(np.argmin(np.isfinite(model_scores_B)))
            found = f"{model_scores_B[row]} for response {row}"
            raise ConfigError(f"reward_model.model: expected finite scores, got {found}")
        combined = []
        for sample, model_score in zip(self.samples, map(float, model_scores_B), strict=True):
            rule_score = sample.score if sample.data_source in scored_sources else None
            score = float(np.float32((rule_score or 0.0) + coef_of(sample.data_source) * model_score))
            combined.append(replace(sample, score=score, rule_score=rule_score, model_score=model_score))
        return ScoredResponses(combined)

    @property
    def scores(self) -> NDArray[np.float32]:
        """[B]."""
        return np.array([sample.score for sample in self.samples], np.float32)

    @property
    def ended(self) -> NDArray[np.bool_]:
        """[B], whether the response ends with an EOS token."""
        return np.array([sample.has_ended for sample in self.samples], np.bool_)

    @property
    def extra(self) -> dict[str, list[Any]]:
        """B values for each of the scorers' other fields, None where a response has none."""
        fields = {name: None for sample in self.samples for name in sample.extra}
        return {name: [sample.extra.get(name) for sample in self.samples] for name in fields}

    @property
    def failures(self) -> Counter[Failure]:
        """How many responses have no score, by reason."""
        return Counter(sample.failure for sample in self.samples if sample.failure)

    def as_rows(self) -> Iterator[dict[str, Any]]:
        """Every response, as the rollout files hold it."""
        columns, names = ["data_source", "prompt", "response", "ground_truth", "score"], list(self.extra)
        if any(sample.model_score is not None for sample in self.samples):
            columns += ["rule_score", "model_score"]
        for sample in self.samples:
            yield {name: getattr(sample, name) for name in columns} | {name: sample.extra.get(name) for name in names}


class Accuracy(BaseModel):
    """Result of one validation; every accuracy is in [0, 1]."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    overall: float = Field(description="mean over all validation responses")
    by_source: dict[str, float] = Field(default_factory=dict, description="mean per data source")


@dataclass(frozen=True)
class ValidationResult:
    """One validation: metrics val-core/... and val-aux/..., and the actor's and the scorers' spans.

    `timings_s` has seconds, of the whole under "testing"; of it what the engine says, e.g. "update_weights".
    """

    accuracy: Accuracy
    metrics: Mapping[str, float]
    responses: ScoredResponses
    timings_s: Mapping[str, float]
    spans: Sequence[Span] = ()


def is_numeric(value: object) -> TypeGuard[float]:
    """Whether a scorer's field can be a metric."""
    return isinstance(value, bool | int | float)
