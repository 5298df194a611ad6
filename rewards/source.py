"""The interface of everything that scores samples: scoring processes, sandboxes for code, a judge."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from rewards.samples import Sample, Scored


class ScoreSource(AbstractAsyncContextManager["ScoreSource"], Protocol):
    """The interface of an object that scores samples; an async context manager, open while the run lasts.

    Leaving the context ends all processes and calls that the object has started, also in the middle of a call.

    Raises:
        ConfigError: on entering: something that scoring needs is missing; one sentence.
    """

    async def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """Scores samples and returns one result per sample, in the same order; a sample without a score has a failure.

        `sample.scorer` is the name of the scorer to use. Several calls of this method may run at the same time.
        """
        ...
