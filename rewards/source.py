"""The interface of everything that scores samples: scoring processes, sandboxes for code, a judge."""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from rewards.samples import Failure, Sample, Scored

NOT_SCORED = "not scored: too many responses before it have no score"


class FailureLimit:
    """Counts the responses that have no score, in one or several batches of samples.

    When more have failed than may, the run will end: sources begin no call for the other samples, so that a scorer that
    hangs costs the time of few responses, not of all.

    Args:
        max_failures: how many responses may have no score.
    """

    def __init__(self, max_failures: float = math.inf) -> None:
        self._max_failures = max_failures
        self._num_samples = 0
        self._failed: set[int] = set()

    @property
    def is_exceeded(self) -> bool:
        """True if more responses have no score than may."""
        return len(self._failed) > self._max_failures

    def numbers(self, num_samples: int) -> range:
        """Returns the numbers of the next samples, by which those that several scorers score are counted once."""
        first = self._num_samples
        self._num_samples += num_samples
        return range(first, self._num_samples)

    def add(self, samples: Iterable[Sample], results: Iterable[Scored]) -> None:
        """Counts those of the samples whose results are failures."""
        self._failed.update(
            sample.number for sample, result in zip(samples, results, strict=True) if result.failure is not None
        )

    def not_scored(self) -> Scored:
        """Returns the result of a sample for which no scorer is called any more."""
        return Scored(0.0, failure=Failure.UNAVAILABLE, message=NOT_SCORED)


class ScoreSource(AbstractAsyncContextManager["ScoreSource"], Protocol):
    """The interface of an object that scores samples; an async context manager, open while the run lasts.

    Leaving the context ends all processes and calls that the object has started, also in the middle of a call.

    Raises:
        ConfigError: on entering: something that scoring needs is missing; one sentence.
    """

    async def score(self, samples: Sequence[Sample], limit: FailureLimit) -> list[Scored]:
        """Scores samples and returns one result per sample, in the same order; a sample without a score has a failure.

        `sample.scorer` is the name of the scorer to use. Several calls of this method may run at the same time.
        Failures are added to `limit`; once it is exceeded, samples get `FailureLimit.not_scored` without a call.
        """
        ...
