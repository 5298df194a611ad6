"""What scoring and validation give: every response with its score, and accuracies."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from controller.ppo.scores import Scores
from controller.workers.span import Span
from rewards.samples import Failure
from splitppo.batch import Column
from splitppo.config import ConfigError
from splitppo.config.reward import OverlongBuffer


class ScoringFailed(Exception):
    """Too many responses have no score; the message is one sentence."""


@dataclass(frozen=True)
class ScoredSample:
    """One of the n responses to a prompt, and what the rewards say about it.

    Attributes:
        prompt, response: decoded.
        score: float32, that of its tokens included; 0 where the scorer failed.
        token_scores: float32, of each response token; None where the scorers place nothing.
        ground_truth, data_source, prompt_index: of the prompt's row, and its place in the table.
        has_ended: whether the response ends with an EOS token.
        is_truncated: whether it was cut off at data.max_response_length.
        extra: the other fields of the scorer's dict.
        failure, message: why a scorer gave none; None if all did.
        place: where the prompt's row stands, e.g. "train.parquet, row 3".
        rule_score: what the scorers gave; None where the data source has none.
        model_score: what the reward model gave; None where there is no reward model.
    """

    prompt: str
    response: str
    score: float
    ground_truth: Any
    data_source: str
    prompt_index: int = 0
    has_ended: bool = True
    is_truncated: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    message: str = ""
    place: str = ""
    rule_score: float | None = None
    model_score: float | None = None
    token_scores: NDArray[np.float32] | None = None


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

    def by_rules(self) -> "ScoredResponses":
        """The same responses with the scorers' scores alone, as if no reward model had scored."""
        return ScoredResponses([replace(sample, score=sample.rule_score or 0.0) for sample in self.samples])

    @property
    def model_scores(self) -> NDArray[np.float32] | None:
        """[B], what the reward model gave; None where it was not asked."""
        scores = [sample.model_score for sample in self.samples if sample.model_score is not None]
        return np.array(scores, np.float32) if len(scores) == len(self.samples) else None

    def with_overlong_penalty(
        self, buffer: OverlongBuffer, lengths_B: NDArray[np.integer[Any]], max_response_length: int
    ) -> "ScoredResponses":
        """The same responses, the long ones punished; fields `overlong_reward` and `overlong` with `buffer.log`."""
        if not buffer.enable:
            return self
        punished = []
        for sample, length in zip(self.samples, lengths_B, strict=True):
            penalty = buffer.penalty(int(length), max_response_length)
            extra = {"overlong_reward": penalty, "overlong": penalty < 0.0} if buffer.log else {}
            score = float(np.float32(sample.score + penalty))
            punished.append(replace(sample, score=score, extra={**sample.extra, **extra}))
        return ScoredResponses(punished)

    def with_truncation(
        self, lengths_B: NDArray[np.integer[Any]], max_response_length: int, stop: Sequence[str]
    ) -> "ScoredResponses":
        """The same responses, those marked that were cut off: of the greatest length, without EOS or a `stop` text."""
        marked = []
        for sample, length in zip(self.samples, lengths_B, strict=True):
            has_ended = sample.has_ended or any(text in sample.response for text in stop)
            is_truncated = bool(length >= max_response_length) and not has_ended
            marked.append(replace(sample, is_truncated=True) if is_truncated else sample)
        return ScoredResponses(marked)

    def with_model_scores(
        self, model_scores_B: NDArray[np.float32], coef_of: Callable[[str], float]
    ) -> "ScoredResponses":
        """The same responses, their scores combined with those of the reward model.

            score = score so far + coef(data source) * model score

        Raises:
            ConfigError: a score of the reward model is not finite.
        """
        if not np.isfinite(model_scores_B).all():
            row = int(np.argmin(np.isfinite(model_scores_B)))
            found = f"{model_scores_B[row]} for response {row}"
            raise ConfigError(f"reward_model.model: expected finite scores, got {found}")
        combined = []
        for sample, model_score in zip(self.samples, map(float, model_scores_B), strict=True):
            score = float(np.float32(sample.score + coef_of(sample.data_source) * model_score))
            combined.append(replace(sample, score=score, model_score=model_score))
        return ScoredResponses(combined)

    def check_failures(self, max_error_rate: float, whose: str) -> None:
        """Ends the run where more than that share of the responses lacks a score; `whose`: e.g. "step 3".

        Raises:
            ScoringFailed: it does.
        """
        failed = [sample for sample in self.samples if sample.failure is not None]
        if len(failed) > max_error_rate * len(self.samples):
            what = f"{len(failed)} of {len(self.samples)} responses of {whose} have no score from a scorer"
            first = f"{failed[0].place}, data_source {failed[0].data_source!r}: {failed[0].message}"
            raise ScoringFailed(f"{what}, more than reward.max_error_rate ({max_error_rate:g}) allows; first {first}")

    @property
    def scores(self) -> NDArray[np.float32]:
        """[B]."""
        return np.array([sample.score for sample in self.samples], np.float32)

    def as_scores(
        self,
        lengths_B: NDArray[np.int32],
        component_names: Sequence[str] = (),
        greedy_scores: NDArray[np.float32] | None = None,
    ) -> Scores:
        """What the experience takes of responses of these lengths; see `components` and `Scores`."""
        components = self.components(component_names)
        return Scores(self.scores, self.token_scores(lengths_B), self.truncated, components, greedy_scores)

    def components(self, names: Sequence[str]) -> NDArray[np.float32] | None:
        """[K, B], the parts of the scores that are named: fields of the scorers' dicts, or `score`; None without names.

        What a response does not have is 0, as where its scorer failed.

        Raises:
            ConfigError: no response has the field, or one has no finite number there.
        """
        if not names:
            return None
        key, rows = "key 'algorithm.gdpo_reward_keys'", []
        extra = {"score": [sample.score for sample in self.samples], **self.extra}
        for name in names:
            values = extra.get(name, [None])
            if all(value is None for value in values):
                known = ", ".join(field for field, some in extra.items() if any(map(is_numeric, some)))
                raise ConfigError(f"{key}: no response has the field {name!r}; known: {known}")
            for sample, value in zip(self.samples, values, strict=True):
                if value is not None and not (is_numeric(value) and np.isfinite(value)):
                    found = f"got {value!r} for {sample.place}, data_source {sample.data_source!r}"
                    raise ConfigError(f"{key}: expected a finite number in the field {name!r}, {found}")
            rows.append([0.0 if value is None else float(value) for value in values])
        return np.array(rows, np.float32)

    def token_scores(self, lengths_B: NDArray[np.int32]) -> Column | None:
        """What of the scores is placed, aligned with responses of these lengths; None where nothing is."""
        if all(sample.token_scores is None for sample in self.samples):
            return None
        rows = [
            np.zeros(length) if sample.token_scores is None else sample.token_scores
            for sample, length in zip(self.samples, lengths_B, strict=True)
        ]
        return Column.from_rows(rows, np.dtype(np.float32))

    @property
    def ended(self) -> NDArray[np.bool_]:
        """[B], whether the response ends with an EOS token."""
        return np.array([sample.has_ended for sample in self.samples], np.bool_)

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """[B], whether the response was cut off; see `with_truncation`."""
        return np.array([sample.is_truncated for sample in self.samples], np.bool_)

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
        if any(sample.token_scores is not None for sample in self.samples):
            columns += ["token_scores"]
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
